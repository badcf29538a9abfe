"""The shared-memory arena: it belongs to the sender, the receiver maps it read-only.

Nobody ever writes into another process's memory, so a sender thawed after its time
cannot hurt. The file lies in /dev/shm under a random name until the receiver has mapped
it and proved so by reading its nonce; then it is unlinked, and lives as long as the two
mappings. The sender holds a lock on it, which ends with its process: a file without one
was left by a sender that was killed, and is swept away. (Not
`multiprocessing.shared_memory`: its resource tracker unlinks segments of others and
outlives its process.)

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

import numpy as np
import numpy.typing as npt

from outrider.kv_transfer.base import Payload
from outrider.kv_transfer.shared_window import SharedWindow

NAME_PREFIX = "outrider-kv-"
NONCE_BYTES = 16
HEAD_BYTES = 4096
MAX_ARENA_BYTES = 1 << 30
IDLE_SECONDS = 60.0
MAX_IDLE = 16
MIN_SWEPT_SECONDS = 60.0
"""Younger files are left alone: their senders may be about to lock them."""


def arena_path(directory: str, arena_id: bytes) -> Path:
    """Returns the path of an arena. Both sides derive it, so that a peer can name an arena but never a file."""
    return Path(directory, NAME_PREFIX + arena_id.hex())


def sweep(directory: str) -> int:
    """Removes the files that killed senders of this user have left. Returns how many."""
    num_removed = 0
    for path in Path(directory).glob(f"{NAME_PREFIX}*"):
        with contextlib.suppress(OSError), own_file(path) as (descriptor, status):  # or its sender lives
            if time.time() - status.st_mtime >= MIN_SWEPT_SECONDS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                num_removed += 1
    return num_removed


@contextlib.contextmanager
def own_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Opens the file for reading: (descriptor, status). Raises: OSError where it is gone or another user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no file of this user's")
        yield descriptor, status
    finally:
        os.close(descriptor)


class Arena:
    """The sender's side: its slots are taken, filled, sent and released. Thread-safe.

    Memory is reserved slot by slot as slots are first needed (`posix_fallocate`): a full
    /dev/shm is then an error that can be handled, rather than a SIGBUS. The memory goes with
    the object, once the receiver has unmapped it too. Raises in the constructor: OSError,
    also when there is no room for one slot.
    """

    def __init__(self, *, directory: str, num_bytes: int, slot_bytes: int, has_slots: bool = True) -> None:
        """`has_slots`: whether the slots are in the file. If not, the file has memory for its head only."""
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
        self._taken: dict[int, object] = {}  # by offset, for whom; None: quarantined

    def unlink(self) -> None:
        """Removes the file's name; mappings stay. Idempotent."""
        self._path.unlink(missing_ok=True)

    def retire(self) -> None:
        """Gives out no more slots, and tells whoever waits for one."""
        self.unlink()
        self.free_slots.close()

    def quarantine(self, owner: object) -> None:
        """Keeps the owner's slots taken until the receiver acknowledges them after all.

        The receiver was not drained, so it may read them at any later time.
        """
        with self._lock:
            self._taken.update({offset: None for offset, of in self._taken.items() if of is owner})

    @property
    def is_worn(self) -> bool:
        """Whether so many slots are quarantined that new transfers should use another arena."""
        with self._lock:
            return 4 * list(self._taken.values()).count(None) >= self.num_slots

    def take(self, owner: object) -> int | None:
        """Takes a slot, for one of `free_slots`; returns its offset. None: there is no memory for more slots."""
        with self._lock:
            if not self._free and not self._reserve():
                self.num_slots -= 1
                return None
            offset = self._free.pop()
            self._taken[offset] = owner
            return offset

    def _reserve(self) -> bool:
        """Adds a fresh slot to the free ones if there is memory for it. Needs the lock."""
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

    def write(self, offset: int, payload: Payload) -> None:
        """Fills a taken slot (numpy copies without the GIL)."""
        assert isinstance(payload, memoryview)
        self._bytes[offset : offset + len(payload)] = np.frombuffer(payload, dtype=np.uint8)

    def release(self, offset: int) -> None:
        """Frees a slot that the receiver has acknowledged."""
        with self._lock:
            del self._taken[offset]
            self._free.append(offset)
        self.free_slots.hear()
        self.free_slots.give_back(1)


@dataclass(eq=False)
class ArenaMapping:
    """The receiver's view of one sender's arena, which it only reads."""

    arena_id: bytes
    nonce: bytes
    num_bytes: int
    copy_out: Callable[[int, int], Payload]  # (offset, number of bytes)
    num_users: int = 0
    idle_since: float = 0.0

    def copy(self, offset: int, length: int) -> Payload | None:
        """Returns a private copy, or None for a range outside the slots.

        The sender can change the pages at any moment; of a copy, the bytes that are checked are those that are written.
        """
        is_inside = offset >= HEAD_BYTES and offset + length <= self.num_bytes
        return self.copy_out(offset, length) if is_inside else None


class ArenaReader:
    """The arenas that a receiver has mapped. A mapping outlives a transfer: the next one finds it again.

    Whenever a transfer begins or ends, mappings that nobody has used for a minute are dropped, and the oldest ones if
    there are too many. Their sender then offers a new arena. Thread-safe.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._mappings: OrderedDict[bytes, ArenaMapping] = OrderedDict()

    def attach(self, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        """Maps an arena. Returns None where it is missing, or is not a file that only this user can truncate."""
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
            # Who may truncate the file could kill us by SIGBUS: only we ourselves may.
            with own_file(arena_path(self._directory, arena_id)) as (descriptor, status):
                return self._open(descriptor, arena_id, num_bytes) if status.st_size == num_bytes else None
        except OSError:
            return None  # another host or container, or unlinked

    def _open(self, descriptor: int, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        """Maps the content of the file. Raises: OSError."""
        mapping = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)

        def copy_out(offset: int, length: int) -> memoryview:  # numpy copies without the GIL
            return np.frombuffer(mapping, np.uint8, length, offset).copy().data.toreadonly()

        return ArenaMapping(arena_id, mapping[:NONCE_BYTES], num_bytes, copy_out)

    def _drop_idle(self) -> None:
        """Drops idle mappings; their memory is freed with the last view of it. Needs the lock."""
        idle = [mapping for mapping in self._mappings.values() if mapping.num_users == 0]
        idle.sort(key=lambda mapping: mapping.idle_since)
        horizon = time.monotonic() - IDLE_SECONDS
        for index, mapping in enumerate(idle):
            if mapping.idle_since < horizon or len(idle) - index > MAX_IDLE:
                del self._mappings[mapping.arena_id]
