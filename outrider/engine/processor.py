"""How a process that computes on a CPU should be set up. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from outrider.engine.control_groups import cpu_quota
from outrider.errors import ConfigError

ENVIRONMENT = {
    # OpenMP threads that wait at a barrier spin this often before they sleep: nodes share cores (ADR 12).
    "GOMP_SPINCOUNT": "2000",
    # Transparent huge pages for torch's buffers, where the system allows them.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Variables that libgomp and torch read when they are loaded."""


def usable_cpus() -> list[int]:
    """The processors that this process may use, rising; a container or taskset may have left it few."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def within_quota(cpus: Sequence[int]) -> list[int]:
    """As many of them as a container's limit on processor time (`docker run --cpus 2`) keeps busy.

    It names no processors: count them, and leave threads free to run on all.
    """
    return list(cpus[: cpu_quota()])


def about_processor() -> dict[str, str]:
    """What Linux says of the first one in /proc/cpuinfo, by its names; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def prepare_environment(cpus: Sequence[int] = ()) -> None:
    """Call it in `main`, before anything imports torch. What the user's environment sets wins.

    `cpus`: the processors of this process from here on, and of every thread that it starts;
    empty: those that it has. Raises ConfigError for one that it may not use.
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
