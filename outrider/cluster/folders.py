"""Temporary folders of clusters. A supervisor locks those of its cluster; any left behind are removed after a day."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "outrider-"
OURS = re.compile(PREFIX + r"\d+-([0-9a-f]{8}|turns-\w{8})")
"""Matches the names of temporary folders, but not log folders named by users, such as outrider-2026-11-26."""
KEPT_SECONDS = 86_400.0
"""Seconds for which the temporary folder of a cluster that was killed or could not start is kept, with its logs."""


def shared_memory_directory() -> Path:
    """Returns a directory in memory if there is one, otherwise the system's temporary directory.

    On a disk, the write-back of a mapped file would stall the processes that use the file.
    """
    shared = Path("/dev/shm")  # noqa: S108 names in it are random
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def hold(folder: Path, lock: int = fcntl.LOCK_SH) -> int:
    """Returns a file descriptor. Until it is closed, other supervisors cannot remove the folder. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_stale_folders() -> None:
    """Removes folders, at least a day old, of this user's clusters that were killed or could not start."""
    for folder in {Path(tempfile.gettempdir()), shared_memory_directory()}:
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if not OURS.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                    continue
                last_write = max(each.lstat().st_mtime for each in (path, *path.iterdir()))
                if time.time() - last_write > KEPT_SECONDS:
                    os.close(hold(path, fcntl.LOCK_EX))
                    shutil.rmtree(path)
