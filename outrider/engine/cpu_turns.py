"""Turns of nodes that compute on the same processors, so that each has all of them for a while.

Two teams of threads on the same cores each run at half speed and the system decides who
gets on: a decode node in a batch of three holds up the prompts of thirteen others. In
turns the nodes decide: a prefill node computes for so long, then each decode node that
waits does a step. A turn is a lease in a file that the nodes map (source/turns.h): who was
killed or stopped loses it, and no result depends on it. Torch-free.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.errors import ConfigError

LEAST_LEASE_SECONDS = 0.5
LEASE_FACTOR = 3.0
"""A holder may take so many times as long as it expected, which another program on its processors may well cause."""

TAKEN_FROM_ANOTHER = "a node on the same processors showed no life in its turn; this one goes on"
"""What to say in `on_taken_from_another`."""

_NOT_TAKEN, _TAKEN, _TAKEN_FROM_ANOTHER = range(3)


class CpuTurns(Protocol):
    """Engine thread only."""

    @property
    def description(self) -> str:
        """For people: the file, or "none"."""

    def take(self, timeout_seconds: float) -> bool:
        """Waits for this node's turn, in line; False: not in that time, and the place in line is kept."""

    def keep(self, expected_seconds: float) -> bool:
        """In a turn: there will be another sign of life in about that time. False: the turn is lost already."""

    def is_over(self, seconds: float) -> bool:
        """In a turn: whether it has lasted for so long, and others wait for it."""

    def give(self) -> None:
        """The turn is the next one's; leaves the line where there was none. Idempotent."""


class NoTurns:
    """For a node that shares its processors with no other: it is always its turn."""

    def __init__(self, description: str = "none") -> None:
        self.description = description

    def take(self, timeout_seconds: float) -> bool:
        return True

    def keep(self, expected_seconds: float) -> bool:
        return True

    def is_over(self, seconds: float) -> bool:
        return False

    def give(self) -> None:
        return


class SharedTurns:
    """Turns in a file that all nodes on the same processors map. One in a process: seats are the process's."""

    def __init__(
        self,
        library: KernelLibrary,
        path: Path,
        *,
        least_lease_seconds: float = LEAST_LEASE_SECONDS,
        on_taken_from_another: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes a seat among the nodes that have the file open; those that have ended leave theirs.

        `on_taken_from_another` is called when a turn was not given but had run out: its
        holder has ended, stands still, or was much slower than it expected.

        Raises: ConfigError when the file cannot be had or is something else, or no seat is left.
        """
        self.description = str(path)
        self._on_taken_from_another = on_taken_from_another
        self._least_lease_seconds = least_lease_seconds
        self._calls = library.functions
        self._short_calls = library.functions_holding_lock
        size = self._calls.outrider_turns_size()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _check_file(os.fstat(self._descriptor), size)
            _allocate(self._descriptor, size)
            self._seat = _take_seat(self._descriptor, self._calls.outrider_turns_seats())
            self._memory = mmap.mmap(self._descriptor, size)
        except OSError as error:
            raise ConfigError(f"turns cannot be taken in {path}: {error}") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._taken_at = 0.0
        self.give()  # what the seat's last holder left behind

    def take(self, timeout_seconds: float) -> bool:
        calls = self._calls if timeout_seconds > 0 else self._short_calls
        taken = calls.outrider_turns_take(self._address, self._seat, self._lease(0.0), round(timeout_seconds * 1e9))
        if taken == _TAKEN_FROM_ANOTHER:
            self._on_taken_from_another()
        self._taken_at = time.monotonic()
        return bool(taken != _NOT_TAKEN)

    def keep(self, expected_seconds: float) -> bool:
        return bool(self._short_calls.outrider_turns_keep(self._address, self._seat, self._lease(expected_seconds)))

    def is_over(self, seconds: float) -> bool:
        has_lasted = time.monotonic() - self._taken_at >= seconds
        return has_lasted and bool(self._short_calls.outrider_turns_is_wanted(self._address, self._seat))

    def give(self) -> None:
        self._short_calls.outrider_turns_give(self._address, self._seat, self._lease(0.0))

    def _lease(self, expected_seconds: float) -> int:
        """Nanoseconds; the library limits them."""
        return round(max(LEASE_FACTOR * expected_seconds, self._least_lease_seconds) * 1e9)


def open_turns(
    path: str,
    kernels: CpuKernels | None,
    *,
    cpus: Sequence[int],
    on_taken_from_another: Callable[[], None] = lambda: None,
) -> CpuTurns:
    """Of the nodes that name the same path and compute on the same `cpus`.

    None for an empty path, where no native kernels compute, and for a node that would leave
    some of its processors idle in its turn.

    Raises: ConfigError.
    """
    if not path:
        return NoTurns()
    if kernels is None:
        return NoTurns("none: they need native kernels")
    if kernels.team.num_threads < len(cpus):
        return NoTurns("none: fewer threads than processors")
    file = Path(f"{path}-{_ranges(cpus)}")
    return SharedTurns(kernels.library, file, on_taken_from_another=on_taken_from_another)


def _ranges(cpus: Sequence[int]) -> str:
    """Rising numbers as a file's name can hold them: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _check_file(file: os.stat_result, size: int) -> None:
    """Whether nobody else can have put it there, or write into it. Raises: OSError."""
    if not stat.S_ISREG(file.st_mode) or file.st_size not in (0, size):
        raise OSError("it is not a file of turns")
    if file.st_uid != os.geteuid() or file.st_mode & 0o022:
        raise OSError("another user owns it or can write to it")


def _allocate(descriptor: int, size: int) -> None:
    """Zeros, where the file is new. Raises: OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # a full disk is an error now, not a signal later
    else:
        os.ftruncate(descriptor, size)


def _take_seat(descriptor: int, num_seats: int) -> int:
    """The first that no process holds; the system frees it when this one ends. Raises: OSError."""
    for seat in range(num_seats):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
        except (BlockingIOError, PermissionError):
            continue
        return seat
    raise OSError(f"all {num_seats} seats are taken")
