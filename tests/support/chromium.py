"""Chromium without a window, controlled by its command line, without a driver or a Python package."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no Chromium: none of {', '.join(NAMES)} is in PATH; `make browser` installs one on Debian and Ubuntu"
END_SECONDS = 60.0
"""Seconds that Chromium may take. A view takes about one second on an idle machine."""
NUM_STARTS = 2
"""Attempts to start Chromium. On a busy machine, about one of a hundred starts hangs."""


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def dump_dom(url: str, profile: Path, *, view_seconds: float = 3.0, size: tuple[int, int] = (1280, 800)) -> str:
    """Returns the page's HTML once its scripts have run for `view_seconds` of its own clock, which skips idle time."""
    return _run(url, profile, view_seconds, size, "--dump-dom")


def screenshot(
    url: str,
    file: Path,
    profile: Path,
    *,
    view_seconds: float = 3.0,
    size: tuple[int, int] = (1280, 800),
) -> None:
    """Writes a picture of the window as a PNG, in light colours."""
    light = "--blink-settings=preferredColorScheme=1"
    _run(url, profile, view_seconds, size, f"--screenshot={file}", "--hide-scrollbars", light)


def _run(url: str, profile: Path, view_seconds: float, size: tuple[int, int], *flags: str) -> str:
    """Raises: RuntimeError if there is no Chromium; CalledProcessError; TimeoutExpired."""
    program = find_chromium()
    if program is None:
        raise RuntimeError(MISSING)
    command = [
        program,
        "--headless",
        "--no-sandbox",  # it runs as root in containers, and opens only pages of this project
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        f"--window-size={size[0]},{size[1]}",
        f"--virtual-time-budget={view_seconds * 1000:.0f}",
    ]
    for start in range(NUM_STARTS):
        own_profile = f"--user-data-dir={profile / str(start)}"
        try:
            ended = subprocess.run(
                [*command, own_profile, *flags, url], check=True, capture_output=True, text=True, timeout=END_SECONDS
            )
        except subprocess.TimeoutExpired:
            if start + 1 == NUM_STARTS:
                raise
            warnings.warn(f"Chromium did not end within {END_SECONDS:g} s; it is started again", stacklevel=3)
        else:
            return ended.stdout
    raise AssertionError("unreachable")
