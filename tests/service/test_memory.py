"""How a service process limits its memory."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

COUNT_HEAPS = """
import ctypes, threading
from outrider.heap import limit_heaps

if {shares}:
    limit_heaps()
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    raise SystemExit(77)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)

def allocate():
    together.wait(30)
    libc.malloc(ctypes.c_size_t(1000))
    together.wait(30)

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.parametrize(
    ("shares", "environment", "fewest", "most"),
    [
        (True, {}, 1, 2),
        (False, {}, 3, 9),  # without this difference, the case above would prove nothing
        (True, {"MALLOC_ARENA_MAX": "5"}, 3, 5),
    ],
)
def test_threads_share_two_heaps_unless_the_environment_says_otherwise(shares, environment, fewest, most):
    ended = run_python("-c", COUNT_HEAPS.format(shares=shares), env={"PATH": "", **environment})
    if ended.returncode == 77:
        pytest.skip("this C library is not glibc")
    assert ended.returncode == 0, ended.stderr
    assert fewest <= ended.stdout.count("<heap nr=") <= most
