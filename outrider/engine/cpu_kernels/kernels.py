"""What computes in a process: one library and one team of threads. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.cpu_kernels.library import KernelLibrary, Team


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """A loaded library and the threads that compute with it."""

    library: KernelLibrary
    team: Team
