"""The native CPU kernels of this machine, for samplers under test."""

from __future__ import annotations

import functools

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.paths import choose_kernels


@functools.cache
def native_kernels() -> CpuKernels | None:
    """Returns the kernels, or None if there is no compiler, in which case torch computes."""
    path = choose_kernels().library
    if path is None:
        return None
    return CpuKernels(KernelLibrary(path), 2)
