"""The peers' cache directory, which holds a virtual environment for each of them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from process import run_logged

INSTALL_SECONDS = 3600.0
DIRECTORY_VARIABLE = "OUTRIDER_PEERS_DIR"


def peers_directory() -> Path:
    """Returns $OUTRIDER_PEERS_DIR, or ~/.cache/outrider-peers if it is not set."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "outrider-peers"


def borrowed_packages() -> dict[str, str]:
    """Returns variables with which another environment's Python finds what it lacks, such as torch, in this one."""
    return {"PYTHONPATH": sysconfig.get_path("purelib")}


class Environment:
    """A virtual environment that is separate from this project's."""

    def __init__(self, name: str) -> None:
        self.directory = peers_directory() / name
        self.python = self.directory / "bin" / "python"
        self.log = self.directory / "install.log"

    def install(self, requirements: Sequence[str], *, without: Sequence[str] = ()) -> None:
        """Installs packages from pip's registry. `without`: dependencies to uninstall afterwards.

        Raises: PeerError.
        """
        wanted = "\n".join([*requirements, *(f"without {name}" for name in without)])
        stamp = self.directory / "installed.txt"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.run(sys.executable, "-m", "venv", str(self.directory))
        self.run(str(self.python), "-m", "pip", "install", *requirements)
        if without:
            self.run(str(self.python), "-m", "pip", "uninstall", "-y", *without)
        stamp.write_text(wanted, encoding="utf-8")

    def run(self, *command: str, **variables: str) -> None:
        """Runs a command of the installation. Raises: PeerError."""
        run_logged(command, log=self.log, seconds=INSTALL_SECONDS, **variables)
