"""A loaded model, as far as runners know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.device import device_type
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.cpu_kernels.modules import NativeLayers
    from outrider.engine.fused_decoder import FusedDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableModel:
    """What a runner needs of a loaded model (see outrider.model_hub.loaded_model.LoadedModel)."""

    model: PreTrainedModel | None  # in eval mode, its attention is ours; None where `native` is a NativeDecoder
    native: NativeDecoder | NativeLayers | None  # what computes in place of `model`, or in its layers
    device: str  # as torch names it
    spec: ModelSpec
    fused: FusedDecoder | None = None  # what computes `model` on a GPU in place of its modules, by their weights

    @property
    def cpu_kernels(self) -> CpuKernels | None:
        """Library and threads that compute the model, for what else computes beside it; None without them."""
        return None if self.native is None else self.native.kernels

    def make_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """A cache for the model's steps. On a GPU it has a scratch block for padded ones."""
        return PagedKVCache(
            self.spec.planes,
            num_blocks=num_blocks,
            block_size=block_size,
            device=self.device,
            num_scratch_blocks=0 if device_type(self.device) == "cpu" else 1,
            kernels=self.cpu_kernels,
        )
