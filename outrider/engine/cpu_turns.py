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
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.errors import ConfigError

LEAST_LEASE_SECONDS = 0.5
MOST_LEASE_SECONDS = 10.0
LEASE_FACTOR = 3.0  # of the longest of the last stretches between two signs of life
NUM_STRETCHES = 16

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

    def is_over(self, seconds: float) -> bool:
        """In a turn, between pieces of work: whether to give it back, after so long and if others wait for it.

        It is a sign of life, too: who gives none for long loses the turn, and then it is over.
        """

    def give(self) -> None:
        """The turn is the next one's; leaves the line where there was none. Idempotent."""


class NoTurns:
    """For a node that shares its processors with no other: it is always its turn."""

    def __init__(self, description: str = "none") -> None:
        self.description = description

    def take(self, timeout_seconds: float) -> bool:
        return True

    def is_over(self, seconds: float) -> bool:
        return False

    def give(self) -> None:
        return


class SharedTurns:
    """Turns in a file that all nodes on the same processors map."""

    def __init__(
        self, library: KernelLibrary, path: Path, *, on_taken_from_another: Callable[[], None] = lambda: None
    ) -> None:
        """Takes a seat among the nodes that have the file open; those that have ended leave theirs.

        `on_taken_from_another` is called when a turn was not given but had run out: its
        holder has ended, stands still, or was much slower than usual.

        Raises: ConfigError when the file cannot be had, or no seat is left.
        """
        self.description = str(path)
        self._on_taken_from_another = on_taken_from_another
        self._calls = library.functions
        self._short_calls = library.functions_holding_lock
        size = self._calls.outrider_turns_size()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._descriptor, size)  # zeros, where it is new
            self._seat = _take_seat(self._descriptor, self._calls.outrider_turns_seats())
            self._memory = mmap.mmap(self._descriptor, size)
        except OSError as error:
            raise ConfigError(f"turns cannot be taken in {path}: {error}") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._stretches: deque[float] = deque([0.0], maxlen=NUM_STRETCHES)
        self._taken_at = self._alive_at = 0.0
        self._holds = False
        self._short_calls.outrider_turns_give(self._address, self._seat)  # what the seat's last holder left behind

    def take(self, timeout_seconds: float) -> bool:
        calls = self._calls if timeout_seconds > 0 else self._short_calls
        taken = calls.outrider_turns_take(self._address, self._seat, self._lease(), round(timeout_seconds * 1e9))
        if taken == _TAKEN_FROM_ANOTHER:
            self._on_taken_from_another()
        self._holds = taken != _NOT_TAKEN
        self._taken_at = self._alive_at = time.monotonic()
        return self._holds

    def is_over(self, seconds: float) -> bool:
        self._learn_stretch()
        if not self._short_calls.outrider_turns_keep(self._address, self._seat, self._lease()):
            return True
        return self._alive_at - self._taken_at >= seconds and bool(
            self._short_calls.outrider_turns_is_wanted(self._address, self._seat)
        )

    def give(self) -> None:
        if self._holds:
            self._learn_stretch()
            self._holds = False
        self._short_calls.outrider_turns_give(self._address, self._seat)

    def _learn_stretch(self) -> None:
        now = time.monotonic()
        self._stretches.append(now - self._alive_at)
        self._alive_at = now

    def _lease(self) -> int:
        """Nanoseconds."""
        seconds = LEASE_FACTOR * max(self._stretches)
        return round(min(max(seconds, LEAST_LEASE_SECONDS), MOST_LEASE_SECONDS) * 1e9)


def open_turns(
    path: str, kernels: CpuKernels | None, *, on_taken_from_another: Callable[[], None] = lambda: None
) -> CpuTurns:
    """Of the nodes that name the same file; none for an empty path, or where no native kernels compute.

    Raises: ConfigError.
    """
    if not path:
        return NoTurns()
    if kernels is None:
        return NoTurns("none: they need native kernels")
    return SharedTurns(kernels.library, Path(path), on_taken_from_another=on_taken_from_another)


def _take_seat(descriptor: int, num_seats: int) -> int:
    """The first that no process holds; the system frees it when this one ends. Raises: OSError."""
    for seat in range(num_seats):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
        except (BlockingIOError, PermissionError):
            continue
        return seat
    raise OSError(f"all {num_seats} seats are taken")
