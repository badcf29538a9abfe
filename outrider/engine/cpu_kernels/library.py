"""A loaded library of kernels, and the scratch memory of its callers. Torch-free.

One library is built for each instruction path; a process loads one of them (paths.py chooses). Calls release Python's
lock unless made through `functions_holding_lock`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from outrider.engine.cpu_kernels.interface import declare
from outrider.engine.step_clock import ForwardPhases


class ElementType(IntEnum):
    """The type of weights, activations, keys and values.

    Types from INT8 on are for weights only. Products with such weights round the activations to int8 too. Groups of
    inputs have their own scales, and minima if the name says so: weight = scale · code - minimum.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # with one scale for each output feature
    INT8_GROUPS_16 = 3
    INT8_GROUPS_32 = 4
    INT8_GROUPS_32_MINIMA = 5
    INT4_GROUPS_32 = 6
    INT4_GROUPS_32_MINIMA = 7
    INT4_ZEROS = 8  # in groups of 64 or a multiple, with zero points: weight = scale · (code - zero)


class KernelLibrary:
    """A loaded library. `functions.outrider_…` are its C functions, checked by signature.

    Functions that compute raise MemoryError if scratch memory cannot be allocated.
    """

    def __init__(self, file: Path) -> None:
        """Raises: OSError if the file cannot be loaded."""
        self.file = file
        self.functions = ctypes.CDLL(str(file))
        handle = self.functions._handle  # noqa: SLF001 documented; the underscore only avoids clashes with functions
        self.functions_holding_lock = ctypes.PyDLL(str(file), handle=handle)
        """The same functions, called without releasing Python's lock, for very short calls."""
        for functions in (self.functions, self.functions_holding_lock):
            declare(functions)
        self.path: str = self.functions.outrider_path().decode()
        """The instruction path, such as "portable"."""


def free_when_collected(owner: object, free: Callable[[int], object], handle: int) -> None:
    """Frees the handle when its owner is collected, but not at process exit, when a thread may still use it."""
    weakref.finalize(owner, free, handle).atexit = False


STEP_PHASES = ("linear", "attention", "norm", "rope", "head")
"""The phases of a native decoder's step, indexed by OutriderPhase."""


class Workspace(ForwardPhases):
    """Scratch memory of one runner, which grows with its largest step. Also measures a native decoder's phases."""

    def __init__(self, library: KernelLibrary) -> None:
        self._functions = library.functions
        self.handle: int = library.functions.outrider_workspace_create()
        if not self.handle:
            raise MemoryError("no memory for a workspace of the native kernels")
        free_when_collected(self, library.functions.outrider_workspace_free, self.handle)

    def start(self) -> None:
        self.take()
        self._functions.outrider_workspace_measure(self.handle, 1)

    def stop(self) -> None:
        self._functions.outrider_workspace_measure(self.handle, 0)

    def take(self) -> dict[str, int]:
        """Returns the nanoseconds of each of STEP_PHASES since the last call."""
        spent = (ctypes.c_int64 * len(STEP_PHASES))()
        self._functions.outrider_workspace_take_times(self.handle, spent)
        return dict(zip(STEP_PHASES, spent, strict=True))
