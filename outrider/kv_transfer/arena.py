"""The shared-memory arena, which belongs to the sender; the receiver maps it read-only.

No process ever writes into another one's memory, so a sender that was frozen (SIGSTOP) and
continues too late does no harm. The file has a random name in /dev/shm. Once the receiver
has proved that it has mapped the file, by returning the nonce that the file holds, the file
is unlinked, and its memory lives as long as the two mappings. The sender holds a lock on the
file, which ends with the sender's process. So an unlocked file was left by a killed sender,
and is removed.
(`multiprocessing.shared_memory` is unsuitable: its resource tracker unlinks segments of
other processes and outlives its process.)

    bytes 0..15    nonce
    from 4096      slots of equal size, each written by the sender, read by the receiver,
                   and used again only after the receiver has acknowledged it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.kv_transfer.base import Payload
from outrider.kv_transfer.shared_window import SharedWindow

NAME_PREFIX = "outrider-kv-"
NONCE_BYTES = 16
HEAD_BYTES = 4096
MAX_ARENA_BYTES = 1 << 30
IDLE_SECONDS = 60.0
"""Seconds without a transfer after which both sides drop an arena."""
MAX_IDLE = 64
"""Maximum number of idle arenas that a receiver keeps mapped. Each process of a prefill node has one."""
MIN_SWEPT_SECONDS = 60.0
"""Minimum age in seconds of a file that `sweep` removes, because a younger file's sender may be about to lock it."""


def arena_path(directory: str, arena_id: bytes) -> Path:
    """Returns an arena's path. Both sides derive it from the id, so a peer can never name another file."""
    return Path(directory, NAME_PREFIX + arena_id.hex())


def sweep(directory: str) -> int:
    """Removes files left by killed senders of this user. Returns their number."""
    num_removed = 0
    for path in Path(directory).glob(f"{NAME_PREFIX}*"):
        with contextlib.suppress(OSError), open_own_file(path) as (descriptor, status):  # fails if the sender lives
            if time.time() - status.st_mtime >= MIN_SWEPT_SECONDS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                num_removed += 1
    return num_removed


@contextlib.contextmanager
def open_own_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Opens the file and yields (descriptor, status). Raises: OSError if it is gone or belongs to another user."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a regular file of this user")
        yield descriptor, status
    finally:
        os.close(descriptor)


class Arena:
    """The sender's side, whose slots are taken, filled, sent and released. Thread-safe.

    The memory of each slot is reserved when the slot is first needed (`posix_fallocate`), so
    that a full /dev/shm is an error that can be handled rather than a SIGBUS. All memory is
    freed once this object is gone and the receiver has unmapped the file.
    """

    def __init__(self, *, directory: str, num_bytes: int, slot_bytes: int, has_slots: bool = True) -> None:
        """`has_slots`: whether the slots are in the file. Raises: OSError, also if there is no memory for one slot."""
        self.arena_id = secrets.token_bytes(16)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.slot_bytes = slot_bytes
        self.num_slots = max(num_bytes // slot_bytes, 1)
        self.num_bytes = HEAD_BYTES + self.num_slots * slot_bytes
        self._path = arena_path(directory, self.arena_id)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.ftruncate(self._fd, self.num_bytes)
            os.posix_fallocate(self._fd, 0, HEAD_BYTES + slot_bytes * has_slots)
            self._map = mmap.mmap(self._fd, self.num_bytes)
        except OSError:
            self.unlink()
            raise
        self._map[:NONCE_BYTES] = self.nonce
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.free_slots = SharedWindow(self.num_slots)
        self._lock = threading.Lock()
        self._free = [HEAD_BYTES]
        self._num_reserved = 1
        self._has_slots = has_slots
        self._taken: dict[int, object] = {}  # owner of each taken slot, by offset; None if quarantined

    def unlink(self) -> None:
        """Unlinks the file; mappings stay valid. Idempotent."""
        self._path.unlink(missing_ok=True)

    def retire(self) -> None:
        """Unlinks the file, stops granting slots, and wakes the callers that wait for a slot."""
        self.unlink()
        self.free_slots.close()

    def quarantine(self, owner: object) -> None:
        """Keeps the owner's slots taken until the receiver acknowledges them, if ever.

        The receiver may still read these slots, because it has not confirmed that the transfer is drained.
        """
        with self._lock:
            self._taken.update({offset: None for offset, of in self._taken.items() if of is owner})

    @property
    def should_be_replaced(self) -> bool:
        """Whether new transfers should use another arena, because at least a quarter of the slots is quarantined."""
        with self._lock:
            return 4 * list(self._taken.values()).count(None) >= self.num_slots

    def take(self, owner: object) -> int | None:
        """Takes a slot and returns its offset, or None if there is no memory for another slot.

        Call it after taking 1 from `free_slots`.
        """
        with self._lock:
            if not self._free and not self._reserve():
                self.num_slots -= 1
                return None
            offset = self._free.pop()
            self._taken[offset] = owner
            return offset

    def _reserve(self) -> bool:
        """Reserves memory for another free slot. Returns whether there was enough. Needs the lock."""
        offset = HEAD_BYTES + self._num_reserved * self.slot_bytes
        try:
            if self._has_slots:
                os.posix_fallocate(self._fd, offset, self.slot_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return False
        self._free.append(offset)
        self._num_reserved += 1
        return True

    def write(self, offset: int, payload: Any) -> Payload:
        """Copies the payload, a memoryview, to a taken slot (numpy releases the GIL). Returns what is to be hashed."""
        self._bytes[offset : offset + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        view: memoryview = payload
        return view

    def release(self, offset: int) -> None:
        """Frees a slot that the receiver has acknowledged."""
        with self._lock:
            del self._taken[offset]
            self._free.append(offset)
        self.free_slots.hear()
        self.free_slots.give_back(1)


@dataclass(eq=False)
class ArenaMapping:
    """The receiver's read-only view of one sender's arena."""

    arena_id: bytes
    nonce: bytes
    num_bytes: int
    copy_out: Callable[[int, int], Payload]  # takes (offset, number of bytes)
    num_users: int = 0
    idle_since: float = 0.0

    def copy(self, offset: int, length: int) -> Payload | None:
        """Returns a private copy; None if the range is not within the slots.

        The sender can change its pages at any time. The copy makes sure that the bytes that are checked are the bytes
        that are written.
        """
        is_inside = offset >= HEAD_BYTES and offset + length <= self.num_bytes
        return self.copy_out(offset, length) if is_inside else None


class ArenaReader:
    """The arenas that a receiver has mapped. A mapping outlives a transfer, so that the next one can use it.

    Whenever a transfer begins or ends, mappings that have not been used for IDLE_SECONDS are dropped. If more than
    MAX_IDLE idle mappings are left, those that have been idle longest are dropped, too. Their senders then offer new
    arenas. Thread-safe.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._mappings: OrderedDict[bytes, ArenaMapping] = OrderedDict()

    def attach(self, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        """Maps an arena. Returns None if it is missing, or if another user could truncate its file."""
        with self._lock:
            self._drop_idle()
            mapping = self._mappings.get(arena_id) or self._map(arena_id, num_bytes)
            if mapping is not None:
                mapping.num_users += 1
                self._mappings[arena_id] = mapping
            return mapping

    def release(self, mapping: ArenaMapping) -> None:
        with self._lock:
            mapping.num_users -= 1
            mapping.idle_since = time.monotonic()
            self._drop_idle()

    def close(self) -> None:
        with self._lock:
            self._mappings.clear()

    def _map(self, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        if not HEAD_BYTES < num_bytes <= MAX_ARENA_BYTES:
            return None
        try:
            # A user who can truncate the file could kill this process with a SIGBUS.
            with open_own_file(arena_path(self._directory, arena_id)) as (descriptor, status):
                return self._open(descriptor, arena_id, num_bytes) if status.st_size == num_bytes else None
        except OSError:
            return None  # the sender is on another host or in another container, or the file was unlinked

    def _open(self, descriptor: int, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        """Maps the file's content. Raises: OSError."""
        mapping = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)

        def copy_out(offset: int, length: int) -> memoryview:  # numpy releases the GIL while it copies
            return np.frombuffer(mapping, np.uint8, length, offset).copy().data.toreadonly()

        return ArenaMapping(arena_id, mapping[:NONCE_BYTES], num_bytes, copy_out)

    def _drop_idle(self) -> None:
        """Drops idle mappings. Their memory is freed when its last view is gone. Needs the lock."""
        idle = [mapping for mapping in self._mappings.values() if mapping.num_users == 0]
        idle.sort(key=lambda mapping: mapping.idle_since)
        horizon = time.monotonic() - IDLE_SECONDS
        for index, mapping in enumerate(idle):
            if mapping.idle_since < horizon or len(idle) - index > MAX_IDLE:
                del self._mappings[mapping.arena_id]
