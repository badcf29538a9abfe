"""What computes in a process: one library and one team of threads. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.cpu_kernels.library import KernelLibrary, Team
from outrider.engine.cpu_kernels.panels import PanelPlane
from outrider.engine.kv_cache.array_plane import ArrayPlane
from outrider.engine.kv_cache.base import CachePlane
from outrider.engine.kv_cache.planes import PlaneSpec


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """A loaded library and the threads that compute with it."""

    library: KernelLibrary
    team: Team

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        """See `PlaneMaker`: keys and values in panels."""
        if plane.is_feature:
            return ArrayPlane(plane, num_blocks=num_blocks, block_size=block_size)
        return PanelPlane(self.library, plane, num_blocks=num_blocks, block_size=block_size)
