"""Temporary folders of clusters: held while their supervisor lives, removed a day after one that left them."""

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
"""A temporary folder's name; a folder that a user names for logs, outrider-2026-11-26 for instance, has another."""
KEPT_SECONDS = 86_400.0
"""How long the logs of a cluster that could not start, or was killed, are kept in a temporary folder."""


def memory_directory() -> Path:
    """A directory in memory: on a disk, writing back a mapped file would stall its processes."""
    shared = Path("/dev/shm")  # noqa: S108 names there are random
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def hold(folder: Path, lock: int = fcntl.LOCK_SH) -> int:
    """What keeps another supervisor from removing it, until it is closed. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_leftovers() -> None:
    """Folders of this user's clusters whose supervisor is gone, a day after: it was killed, or they could not start."""
    for folder in {Path(tempfile.gettempdir()), memory_directory()}:
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if not OURS.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                    continue
                last_write = max(each.lstat().st_mtime for each in (path, *path.iterdir()))
                if time.time() - last_write > KEPT_SECONDS:
                    os.close(hold(path, fcntl.LOCK_EX))
                    shutil.rmtree(path)
