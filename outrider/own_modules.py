"""How a process of ours is started: it runs our modules and not what lies in the working folder, and ends with us.

`python -m router` looks there first, and a web service has a router.py of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import outrider

ROOT = Path(outrider.__file__).resolve().parents[1]
"""Where our packages lie."""
SEARCH_PATH = "PYTHONPATH"
LAUNCHER = Path(__file__).with_name("launcher.py")


def module_command(module: str) -> list[str]:
    """`python -m MODULE` of this interpreter, without the working folder."""
    return [sys.executable, "-P", "-m", module]


def tied(command: Sequence[str]) -> list[str]:
    """The same, but it gets SIGKILL when the thread that starts it ends, however it does.

    A watcher of a pipe would not do: it does not run in a child that is stopped by SIGSTOP.
    """
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command]


def without_working_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for such a process, and for those that it starts.

    `PYTHONPATH` does not name the working folder either, as `PYTHONPATH=.` does, unless our packages lie there.
    """
    others = {name: value for name, value in environ.items() if name != SEARCH_PATH}
    entries = environ.get(SEARCH_PATH, "").split(os.pathsep)
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed, with all that is in it
        kept = [entry for entry in entries if Path(entry).is_absolute()]
    else:
        folders = [Path(entry).absolute() for entry in entries]
        kept = [str(folder) for folder in folders if folder.resolve() != here or here == ROOT]
    return {**others, **({SEARCH_PATH: os.pathsep.join(kept)} if kept else {})}
