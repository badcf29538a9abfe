"""How a process that computes on a CPU should be set up. Torch-free: it must run before torch is imported."""

from __future__ import annotations

import os

ENVIRONMENT = {
    # Roles share cores: an OpenMP thread that waits gives way soon instead of starving the
    # one it waits for. With a busy neighbour the default made steps ten times slower.
    "GOMP_SPINCOUNT": "20000",
    # Transparent huge pages for torch's buffers, where the system allows them.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Read by libgomp and torch when they are loaded; what the user's environment sets wins."""


def prepare_environment() -> None:
    """Call it in `main`, before anything imports torch."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
