"""Where this user's cache is. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"
"""The directory in place of the user's cache."""


def user_cache_directory() -> Path:
    """What may be made again is kept here: $OUTRIDER_CACHE_DIR, else `outrider` in the user's own cache."""
    if chosen := os.environ.get(CACHE_VARIABLE, ""):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
