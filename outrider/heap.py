"""glibc's heap. Nothing happens with other C libraries, which have none of these functions."""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8  # parameter of mallopt(3)


def limit_heaps() -> None:
    """Limits the number of glibc's heaps (arenas). If each thread had one, the heaps would keep much freed memory,
    e.g. 40 MiB in a prefill node under load.

    To be called before threads are started. The environment (MALLOC_ARENA_MAX) takes precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 2)


def trim_heap() -> None:
    """Returns freed memory to the system. By itself, glibc keeps what lies below memory that is in use."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
