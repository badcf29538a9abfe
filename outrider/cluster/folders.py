"""Temporary folders of clusters. Their supervisor locks them; those that it leaves behind are removed a day later."""

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
"""Matches temporary folders' names, but not those that users choose for logs, such as outrider-2026-11-26."""
KEPT_SECONDS = 86_400.0
"""Seconds that a temporary folder keeps the logs of a cluster that could not start or was killed."""


def shared_memory_directory() -> Path:
    """Returns a directory in memory: on a disk, write-back of a mapped file would stall the processes that use it."""
    shared = Path("/dev/shm")  # noqa: S108 names in it are random
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def hold(folder: Path, lock: int = fcntl.LOCK_SH) -> int:
    """Returns a descriptor that keeps other supervisors from removing the folder until closed. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_stale_folders() -> None:
    """Removes folders of this user's clusters whose supervisor was killed or could not start, after a day."""
    for folder in {Path(tempfile.gettempdir()), shared_memory_directory()}:
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if not OURS.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                    continue
                last_write = max(each.lstat().st_mtime for each in (path, *path.iterdir()))
                if time.time() - last_write > KEPT_SECONDS:
                    os.close(hold(path, fcntl.LOCK_EX))
                    shutil.rmtree(path)
