"""The part of a loaded model that runners use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.device import device_type
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_spec import ModelSpec
from outrider.engine.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.cpu_kernels.modules import NativeLayers
    from outrider.engine.fused_decoder import FusedDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableModel:
    """The part of a loaded model that a runner uses (see outrider.model_hub.loaded_model.LoadedModel)."""

    model: PreTrainedModel | None  # transformers' model, in eval mode, with our attention; None for a NativeDecoder
    native: NativeDecoder | NativeLayers | None  # replaces `model`, or computes some of its layers; None: not native
    device: str  # torch's name
    spec: ModelSpec
    fused: FusedDecoder | None = None  # computes on a GPU what `model` would, with the weights of its modules
    stage: Stage | None = None  # the layers that it computes, of which `spec` states the number; None: all

    @property
    def cpu_kernels(self) -> CpuKernels | None:
        """The kernels that compute the model, for other work on this node; None if they are not native."""
        return None if self.native is None else self.native.kernels

    def make_cache(
        self,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] | None = None,
        state_slots: int = 0,
    ) -> PagedKVCache:
        """Makes a cache for the model's steps. On a GPU it has a scratch block for padded batches. `window_blocks`,
        `state_slots`: see PagedKVCache.
        """
        return PagedKVCache(
            self.spec.planes,
            num_blocks=num_blocks,
            block_size=block_size,
            device=self.device,
            num_scratch_blocks=0 if device_type(self.device) == "cpu" else 1,
            kernels=self.cpu_kernels,
            layer_groups=self.spec.layer_groups,
            window_blocks=window_blocks,
            state_slots=state_slots,
        )
