"""Commands for Outrider's own child processes, which import Outrider's modules, not those of the working folder, and
which end when this process ends.

`python -m router` looks in the working folder first, and a web service may have a router.py of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import outrider

ROOT = Path(outrider.__file__).resolve().parents[1]
"""The folder that contains Outrider's packages."""
SEARCH_PATH = "PYTHONPATH"
LAUNCHER = Path(__file__).with_name("launcher.py")


def module_command(module: str) -> list[str]:
    """Returns `python -m MODULE` for this interpreter, without the working folder."""
    return [sys.executable, "-P", "-m", module]


def kill_with_parent(command: Sequence[str]) -> list[str]:
    """Returns the command for a process that gets SIGKILL when the thread that starts it ends for any reason.

    A thread in the child that watches a pipe would not be enough: such a thread does not run while SIGSTOP stops the
    child.
    """
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command]


def without_working_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for Outrider's processes and their children.

    Its `PYTHONPATH` does not name the working folder, e.g. as ".", unless Outrider's packages are in that folder.
    """
    others = {name: value for name, value in environ.items() if name != SEARCH_PATH}
    entries = environ.get(SEARCH_PATH, "").split(os.pathsep)
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        kept = [entry for entry in entries if Path(entry).is_absolute()]
    else:
        folders = [Path(entry).absolute() for entry in entries]
        kept = [str(folder) for folder in folders if folder.resolve() != here or here == ROOT]
    return {**others, **({SEARCH_PATH: os.pathsep.join(kept)} if kept else {})}
