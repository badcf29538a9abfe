"""Stores lines, such as the answers that routers and decode nodes keep, in the files of a folder of bounded size.

Each writer has its own files, and starts a new one after an error, so that a kill or a full disk leaves at most an
incomplete last line in a file, which readers ignore. All writers of a folder share its limit: a writer that starts a
file removes the oldest files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

SEGMENTS_IN_BOUND = 16


class SegmentWriter:
    """Appends lines to the files ("segments") of one folder, up to `max_bytes` in all. Owned by one thread at a time.

    If several writers share the folder, each may exceed the limit by as much as its open segment still grows.
    """

    def __init__(self, folder: Path, *, pattern: str, next_name: Callable[[], str], max_bytes: int) -> None:
        """`pattern` is a glob that matches the segments of all writers; `next_name` names this writer's next segment.

        Raises: OSError if the folder cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._pattern = pattern
        self._next_name = next_name
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._path = folder  # path of the newest segment; before the first segment, the folder
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Hands the line to the operating system, so that it survives the end of the process. Raises: OSError."""
        is_full = self._num_bytes + len(line) > self._max_bytes // SEGMENTS_IN_BOUND
        if is_full or (self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0):
            self.close()  # the segment is full, or another writer has removed it
        if self._descriptor is None:
            self._descriptor = self._begin_segment(len(line))
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            self.close()
            if not self._num_bytes:  # on a full disk every line fails; none may leave an empty file
                self._path.unlink(missing_ok=True)
            raise
        self._num_bytes += len(line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_segment(self, num_bytes: int) -> int:
        held = self._max_bytes - max(num_bytes, self._max_bytes // SEGMENTS_IN_BOUND)
        found: list[tuple[int, str, int, Path]] = []
        for path in self._folder.glob(self._pattern):
            with contextlib.suppress(FileNotFoundError):  # another writer has removed the file
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):  # writers make only regular files
                    found.append((status.st_mtime_ns, path.name, status.st_size, path))
        for _, _, size, path in sorted(found, reverse=True):  # newest first
            held -= size
            if held < 0:
                path.unlink(missing_ok=True)
        self._num_bytes, self._path = 0, self._folder / self._next_name()
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
