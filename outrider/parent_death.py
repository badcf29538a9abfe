"""A service that was started by a supervisor never outlives it, however the supervisor ends.

Linux sends the signal when the *thread* that spawned the child ends, so supervisors
spawn from their main thread. A watcher of a pipe would not do: it does not run in a
child that is stopped by SIGSTOP.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "OUTRIDER_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL at the parent's death when OUTRIDER_PARENT_PID is set; elsewhere a no-op.

    A parent that died before the kernel was asked is noticed: the process ends at once.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
