"""How a process that computes on a CPU should be set up. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outrider.errors import ConfigError

SPIN_LONG = 20_000
"""For a node whose steps are some hundred short products, one after the other."""

SPIN_SHORT = 100
"""For everything that shares the cores with such a node: give way at once."""


def usable_cpus() -> list[int]:
    """The processors that this process may use, rising; a container or taskset may have left it few."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment(*, spin_count: int) -> dict[str, str]:
    """Variables that libgomp and torch read when they are loaded.

    OpenMP threads that wait at a barrier spin `spin_count` times before they sleep.
    """
    return {
        "GOMP_SPINCOUNT": str(spin_count),
        # Transparent huge pages for torch's buffers, where the system allows them.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def prepare_environment(*, spin_count: int, cpus: Sequence[int] = ()) -> None:
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
    for name, value in environment(spin_count=spin_count).items():
        os.environ.setdefault(name, value)
