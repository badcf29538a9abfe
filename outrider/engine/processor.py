"""Sets up a process that computes on a CPU. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from outrider.engine.control_groups import cpu_quota
from outrider.errors import ConfigError

ENVIRONMENT = {
    # Number of spins of an OpenMP thread at a barrier before it sleeps. It is small because nodes share cores (ADR 12).
    "GOMP_SPINCOUNT": "2000",
    # torch's buffers use transparent huge pages if the system allows them.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Environment variables that libgomp and torch read when they are loaded, with our defaults."""


def usable_cpus() -> list[int]:
    """Returns the processors that this process may use, ascending; a container or taskset may limit them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def within_quota(cpus: Sequence[int]) -> list[int]:
    """Returns as many of `cpus` as a container's CPU limit (`docker run --cpus 2`) can keep busy.

    The limit does not name processors. Use only the length of the result, and let threads run on all processors.
    """
    return list(cpus[: cpu_quota()])


def processor_fields() -> dict[str, str]:
    """Returns the fields of the first processor in /proc/cpuinfo by name; empty on systems other than Linux."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def prepare_environment(cpus: Sequence[int] = ()) -> None:
    """Sets the process's environment and processors. Call it in `main`, before anything imports torch.

    Variables that the user has set take precedence. `cpus`: the processors that this process and every thread that it
    starts may use from now on; empty: no change.

    Raises: ConfigError if the process may not use one of these processors.
    """
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"model.cpus {','.join(map(str, cpus))} is not available: {error}; this process may use "
                f"{','.join(map(str, usable_cpus()))}"
            ) from error
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
