"""Sets up a process that computes on a CPU. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from outrider.engine.control_groups import cpu_quota
from outrider.errors import ConfigError

ENVIRONMENT = {
    # Spins of an OpenMP thread at a barrier before it sleeps: nodes share cores (ADR 12).
    "GOMP_SPINCOUNT": "2000",
    # Transparent huge pages for torch's buffers, if the system allows them.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Environment variables that libgomp and torch read when they are loaded."""


def usable_cpus() -> list[int]:
    """Returns the processors that this process may use, ascending; a container or taskset may limit them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def within_quota(cpus: Sequence[int]) -> list[int]:
    """Returns as many processors as a container's CPU limit (`docker run --cpus 2`) keeps busy.

    The limit names no processors: use the count only, and let threads run on all of them.
    """
    return list(cpus[: cpu_quota()])


def about_processor() -> dict[str, str]:
    """Returns Linux's description of the first processor in /proc/cpuinfo, by field name; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def prepare_environment(cpus: Sequence[int] = ()) -> None:
    """Sets the process's environment and processors. Call it in `main`, before anything imports torch.

    Variables that the user has set take precedence. `cpus`: the processors of this process from here on, and of every
    thread that it starts; empty: no change.

    Raises: ConfigError if the process may not use one of them.
    """
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"model.cpus {','.join(map(str, cpus))} cannot be had: {error}; this process may use "
                f"{','.join(map(str, usable_cpus()))}"
            ) from error
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
