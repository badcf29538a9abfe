"""The CPU kernels of a process: one library and one team of threads. Torch-free."""

from __future__ import annotations

from outrider.engine.cpu_kernels.library import KernelLibrary, free_when_collected
from outrider.engine.cpu_kernels.panels import PanelPlane
from outrider.engine.kv_cache.array_plane import ArrayPlane
from outrider.engine.kv_cache.base import CachePlane
from outrider.engine.kv_cache.planes import PlaneSpec


class CpuKernels:
    """A loaded library and a team of threads: the calling thread, and others, which sleep between jobs.

    The team runs one job at a time and belongs to the thread that runs the engine.
    """

    def __init__(self, library: KernelLibrary, num_threads: int) -> None:
        """`num_threads` includes the caller's thread. Raises: MemoryError if the system allows no more threads."""
        self.library = library
        self.num_threads = num_threads
        self.team: int = library.functions.outrider_team_create(num_threads)
        if not self.team:
            raise MemoryError(f"cannot start {num_threads} threads for the native kernels")
        free_when_collected(self, library.functions.outrider_team_free, self.team)

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        """Implements `PlaneMaker`. Planes of keys and values consist of panels."""
        if not plane.is_attended:
            return ArrayPlane(plane, num_blocks=num_blocks, block_size=block_size)
        return PanelPlane(self.library, plane, num_blocks=num_blocks, block_size=block_size)
