"""A loaded library of kernels, and the scratch memory of its callers. Torch-free.

One library for each instruction path has been built; a process loads one of them (paths.py
chooses). Calls release Python's lock unless they are told to hold it.
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
    """Of weights, activations, keys and values."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # of weights; their products round activations too


class KernelLibrary:
    """A loaded library. `functions.outrider_…` are its C functions, checked by signature.

    Those that compute raise MemoryError when scratch memory cannot be had.
    """

    def __init__(self, file: Path) -> None:
        """Raises OSError when the file cannot be loaded."""
        self.file = file
        self.functions = ctypes.CDLL(str(file))
        handle = self.functions._handle  # noqa: SLF001 documented: only its name keeps clear of functions'
        self.functions_holding_lock = ctypes.PyDLL(str(file), handle=handle)
        """The same without giving up Python's lock, for calls that are over in no time."""
        for functions in (self.functions, self.functions_holding_lock):
            declare(functions)
        self.path: str = self.functions.outrider_path().decode()
        """The instruction path, such as "portable"."""


def free_with(owner: object, free: Callable[[int], object], handle: int) -> None:
    """Frees what the handle stands for when its owner is gone. Not when the process ends: a thread may use it still."""
    weakref.finalize(owner, free, handle).atexit = False


STEP_PHASES = ("linear", "attention", "norm", "rope", "head")
"""By OutriderPhase: what a native decoder's step spends its time on."""


class Workspace(ForwardPhases):
    """Scratch memory of one runner; grows to its largest step. A native decoder counts the time of its steps there."""

    def __init__(self, library: KernelLibrary) -> None:
        self._functions = library.functions
        self.handle: int = library.functions.outrider_workspace_create()
        if not self.handle:
            raise MemoryError("no memory for a workspace of the native kernels")
        free_with(self, library.functions.outrider_workspace_free, self.handle)

    def start(self) -> None:
        self.take()
        self._functions.outrider_workspace_measure(self.handle, 1)

    def stop(self) -> None:
        self._functions.outrider_workspace_measure(self.handle, 0)

    def take(self) -> dict[str, int]:
        """By name of STEP_PHASES."""
        spent = (ctypes.c_int64 * len(STEP_PHASES))()
        self._functions.outrider_workspace_take_times(self.handle, spent)
        return dict(zip(STEP_PHASES, spent, strict=True))
