"""How much processor time the event loop of a service has used, readable from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def event_loop_clock() -> Callable[[], int]:
    """A clock of the main thread's processor time in nanoseconds: `run_service` runs the event loop there.

    Always 0 on systems that do not tell one thread's time to another.
    """
    main_thread = threading.main_thread().ident
    if main_thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0
    clock = time.pthread_getcpuclockid(main_thread)
    return lambda: time.clock_gettime_ns(clock)
