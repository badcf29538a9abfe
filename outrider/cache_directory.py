"""Where this user's cache is, and who may write there. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"
"""The directory in place of the user's cache."""
LOCK_POLL_SECONDS = 0.05
LOCK_REPORT_SECONDS = 1.0


def user_cache_directory() -> Path:
    """What may be made again is kept here: $OUTRIDER_CACHE_DIR, else `outrider` in the user's own cache."""
    if chosen := os.environ.get(CACHE_VARIABLE, ""):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


@contextlib.contextmanager
def locked(path: Path, *, while_waiting: Callable[[], object], seconds: float = float("inf")) -> Iterator[None]:
    """Holds the lock of this file, whose folder is made if need be, for this process alone.

    `while_waiting` is called every second. The system releases the lock of a process that dies, however it dies.
    Raises TimeoutError after `seconds`, OSError where the file cannot be written.
    """
    import fcntl  # not on Windows, where clients are installed and nothing is made

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
                reported_at = now + LOCK_REPORT_SECONDS
            if now > began_at + seconds:
                raise TimeoutError(f"{path} has been locked by another process for {seconds / 60:.0f} minutes")
            time.sleep(LOCK_POLL_SECONDS)
        yield
