"""What computes in a process: one library and one team of threads. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.cpu_kernels.library import KernelLibrary, Team
from outrider.engine.cpu_kernels.panels import PanelPlane
from outrider.engine.kv_cache.planes import PlaneSpec


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """A loaded library and the threads that compute with it."""

    library: KernelLibrary
    team: Team

    def make_plane(self, plane: PlaneSpec, num_slots: int) -> PanelPlane:
        """See `AttentionKernels`."""
        return PanelPlane(self.library, plane, num_slots)
