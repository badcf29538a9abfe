"""Starts a child so that it cannot outlive its parent: `python -I -S launcher.py PARENT_PID COMMAND…`.

Before anything slow is imported, the kernel is asked to send SIGKILL at the parent's death;
the request survives execv. A `preexec_fn` would do the same after a fork, which is
unsafe in a parent with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the kernel was asked
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 the command is the supervisor's own


if __name__ == "__main__":
    main()
