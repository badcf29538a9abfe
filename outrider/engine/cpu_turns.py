"""Turns: nodes on the same processors compute one after another, each on all processors (ADR 17). Torch-free.

A turn is a lease in a file that the nodes map (cpu_kernels/source/turns.h). It expires if its holder dies or hangs.
Turns affect timing only, never results.
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

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.errors import ConfigError

MIN_LEASE_SECONDS = 0.5
LEASE_FACTOR = 3.0
"""Ratio of a lease to the expected duration of a step. Other programs on the processors may delay the holder."""

TURN_TAKEN_OVER = "the turn of a node on the same processors expired; this node took it over"
"""Log message for `on_turn_taken_over`."""

_NOT_TAKEN, _TAKEN, _TAKEN_FROM_ANOTHER = range(3)


class CpuTurns:
    """The turns of a node that shares its processors with no other node. For the engine thread only."""

    def __init__(self, description: str = "none") -> None:
        """`description`: the path of the turns file, or "none" and the reason; shown to users."""
        self.description = description

    def take(self, timeout_seconds: float) -> bool:
        """Waits for a turn in FIFO order. Returns False on timeout; the place in the queue is kept."""
        return True

    def keep(self, expected_seconds: float) -> bool:
        """Renews the lease. Returns False if it has expired. `expected_seconds`: expected time to the next renewal."""
        return True

    def is_over(self, seconds: float) -> bool:
        """Returns whether the turn has lasted at least `seconds` while other nodes wait."""
        return False

    def give(self) -> None:
        """Releases the turn to the node that has waited longest, or leaves the queue. Idempotent."""


class SharedTurns(CpuTurns):
    """Turns in a file that all nodes on the same processors map. A process has at most one instance, which owns one
    slot of the file.
    """

    def __init__(
        self,
        library: KernelLibrary,
        path: Path,
        *,
        min_lease_seconds: float = MIN_LEASE_SECONDS,
        on_turn_taken_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Claims a slot. Slots of exited processes are reclaimed.

        `on_turn_taken_over` is called when this node takes over an expired turn: its holder has died, hangs, or was
        much slower than expected.

        Raises: ConfigError if the file cannot be opened or is not a turns file, or no slot is free.
        """
        super().__init__(str(path))
        self._on_taken_from_another = on_turn_taken_over
        self._min_lease_seconds = min_lease_seconds
        self._calls = library.functions
        self._short_calls = library.functions_holding_lock
        size = self._calls.outrider_turns_size()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _check_file(os.fstat(self._descriptor), size)
            os.posix_fallocate(self._descriptor, 0, size)  # makes a full disk an error now instead of a signal later
            self._slot = _claim_slot(self._descriptor, self._calls.outrider_turns_slots())
            self._memory = mmap.mmap(self._descriptor, size)
        except OSError as error:
            raise ConfigError(f"cannot open the turns file {path}: {error}") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._taken_at = 0.0
        self.give()  # the slot's previous owner may have died during its turn

    def take(self, timeout_seconds: float) -> bool:
        calls = self._calls if timeout_seconds > 0 else self._short_calls
        taken = calls.outrider_turns_take(self._address, self._slot, self._lease(0.0), round(timeout_seconds * 1e9))
        if taken == _TAKEN_FROM_ANOTHER:
            self._on_taken_from_another()
        self._taken_at = time.monotonic()
        return bool(taken != _NOT_TAKEN)

    def keep(self, expected_seconds: float) -> bool:
        return bool(self._short_calls.outrider_turns_keep(self._address, self._slot, self._lease(expected_seconds)))

    def is_over(self, seconds: float) -> bool:
        has_lasted = time.monotonic() - self._taken_at >= seconds
        return has_lasted and bool(self._short_calls.outrider_turns_is_wanted(self._address, self._slot))

    def give(self) -> None:
        self._short_calls.outrider_turns_give(self._address, self._slot, self._lease(0.0))

    def _lease(self, expected_seconds: float) -> int:
        """Returns the duration of a lease in nanoseconds. The library caps it."""
        return round(max(LEASE_FACTOR * expected_seconds, self._min_lease_seconds) * 1e9)


def open_turns(
    path: str,
    kernels: CpuKernels | None,
    *,
    cpus: Sequence[int],
    on_turn_taken_over: Callable[[], None] = lambda: None,
) -> CpuTurns:
    """Opens the turns shared by nodes with the same path and the same `cpus`.

    The node does not share turns if the path is empty, if torch computes the model, or if it has fewer threads than
    processors, because its turns would then leave some processors idle.

    Raises: ConfigError if the file cannot be used.
    """
    if not path:
        return CpuTurns()
    if kernels is None:
        return CpuTurns("none: turns need native kernels")
    if kernels.num_threads < len(cpus):
        return CpuTurns("none: fewer threads than processors")
    file = Path(f"{path}-{_ranges(cpus)}")
    return SharedTurns(kernels.library, file, on_turn_taken_over=on_turn_taken_over)


def _ranges(cpus: Sequence[int]) -> str:
    """Formats ascending numbers as ranges for a file name: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _check_file(file: os.stat_result, size: int) -> None:
    """Checks that no other user can have created the file or can write to it. Raises: OSError otherwise."""
    if not stat.S_ISREG(file.st_mode) or file.st_size not in (0, size):
        raise OSError("it is not a turns file")
    if file.st_uid != os.geteuid() or file.st_mode & 0o022:
        raise OSError("another user owns it or may write to it")


def _claim_slot(descriptor: int, num_slots: int) -> int:
    """Claims the first free slot. The system releases it when this process exits. Raises: OSError if all are in use."""
    for slot in range(num_slots):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except (BlockingIOError, PermissionError):
            continue
        return slot
    raise OSError(f"all {num_slots} slots of the turns file are in use")
