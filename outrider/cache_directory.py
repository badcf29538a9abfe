"""The user's cache: its location, its locks and the removal of old entries. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"
"""Environment variable with the directory that replaces the user's cache."""
LOCK_POLL_SECONDS = 0.05
REPORT_SECONDS = 1.0
"""Seconds between two calls of `while_waiting`."""
KEPT_SECONDS = 30 * 24 * 3600
"""Seconds for which unused entries are kept in a cache."""


def user_cache_directory() -> Path:
    """Returns the folder for files that can be created again: $OUTRIDER_CACHE_DIR, or else `outrider` in the user's own
    cache.
    """
    if chosen := os.environ.get(CACHE_VARIABLE, ""):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


@contextlib.contextmanager
def locked(path: Path, *, while_waiting: Callable[[], object], seconds: float = float("inf")) -> Iterator[None]:
    """Holds the lock of this file, and creates its folder if it is missing.

    `while_waiting` is called every `REPORT_SECONDS`. The system releases the lock of a process that dies in any way.
    Raises: TimeoutError after `seconds`, OSError if the file cannot be written.
    """
    import fcntl  # does not exist on Windows, where only clients are installed

    began_at = reported_at = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            now = time.monotonic()
            if now >= reported_at:
                while_waiting()
                reported_at = now + REPORT_SECONDS
            if now > began_at + seconds:
                raise TimeoutError(f"{path} has been locked by another process for {seconds / 60:.0f} minutes")
            time.sleep(LOCK_POLL_SECONDS)
        yield


def remove_unused(paths: Iterable[Path]) -> None:
    """Removes files and folders that have not been modified for `KEPT_SECONDS`. Whoever uses an entry touches it.

    Another process may remove them at the same time.
    """
    oldest = time.time() - KEPT_SECONDS
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= oldest:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
