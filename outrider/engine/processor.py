"""How a process that computes on a CPU should be set up. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os

SPIN_LONG = 20_000
"""For a node whose steps are some hundred short products, one after the other."""

SPIN_SHORT = 100
"""For everything that shares the cores with such a node: give way at once."""


def environment(*, spin_count: int) -> dict[str, str]:
    """Variables that libgomp and torch read when they are loaded.

    OpenMP threads that wait at a barrier spin `spin_count` times before they sleep.
    """
    return {
        "GOMP_SPINCOUNT": str(spin_count),
        # Transparent huge pages for torch's buffers, where the system allows them.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def prepare_environment(*, spin_count: int) -> None:
    """Call it in `main`, before anything imports torch. What the user's environment sets wins."""
    for name, value in environment(spin_count=spin_count).items():
        os.environ.setdefault(name, value)
