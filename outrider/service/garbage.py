"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

MAX_YOUNG_OBJECTS = 10_000
"""A step of a large batch makes some thousand values, which die with it. By default the collector runs for each 700."""


def settle_garbage_collection() -> None:
    """To be called when everything is loaded that lives as long as the process.

    A model's libraries are 350,000 objects. To look at them takes 0.2 s, in which all threads wait; they are left out
    of every later collection.
    """
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)
