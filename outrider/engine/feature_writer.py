"""Writes the features of a model that torch computes. Hidden states come from the fused decoder or module hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, linear, rms_norm
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.tensor_planes import tensor_of
from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FeatureWriter:
    """The writer of a model's features to their plane. A CUDA graph can capture all of its work."""

    def __init__(self, model: PreTrainedModel, features: FeatureSpec, kv_cache: PagedKVCache, native: object) -> None:
        """`native`: if it is a NativeLayers, its kernels reduce the rows, otherwise torch does.

        Raises: ModelError if the model's layers cannot be found.
        """
        assert isinstance(features, FeatureReduction), "only a native decoder has packed features"
        plane = tensor_of(kv_cache.layers(features.plane_name)[0])  # [num_blocks, block_size, 1, width]
        self._plane = plane.flatten(0, 2)  # [num_slots, width]
        self._decoder = model.get_decoder()
        self._layers = layers_of(self._decoder, model.config.get_text_config(decoder=True).num_hidden_layers)
        self._features = features.to(plane.device, plane.dtype)
        self._taps: dict[int, Tensor] = {}  # the taps of this forward that the reduction uses
        self._native_layers = native if isinstance(native, NativeLayers) else None
        if self._native_layers is not None:
            self._packed = features.pack(self._native_layers.kernels, ELEMENT_TYPES[plane.dtype])

    @contextmanager
    def writing(self, slots: Tensor) -> Iterator[None]:
        """Wraps one forward pass of rows at `slots` [num_rows] int64; their features are written on exit.

        Nothing is written if the forward raises.
        """
        with ExitStack() as hooks:
            hooks.callback(self._taps.clear)
            for tap in set(self._features.taps):
                hooks.callback(self._hook(tap).remove)
            yield
            rows = torch.cat([self._taps[tap] for tap in self._features.taps], dim=-1)
        self._plane.index_copy_(0, slots, self._reduced(rows))  # rows: [num_rows, num_taps * hidden_size]

    def record_tap(self, tap: int, states: Tensor, normed: Tensor | None = None) -> None:
        """Records the residual stream [num_rows, hidden_size] after `tap` layers. `normed`: the stream after the final
        norm, if this is the last layer.
        """
        if tap in self._features.taps:
            self._taps[tap] = normed if normed is not None and self._features.takes_final_norm else states

    def _hook(self, tap: int) -> torch.utils.hooks.RemovableHandle:
        """Registers a hook that records a module's hidden states [1, num_rows, hidden_size]."""
        if tap < len(self._layers):

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self.record_tap(tap, (args[0] if args else kwargs["hidden_states"])[0])

            return self._layers[tap].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.record_tap(tap, (output if isinstance(output, Tensor) else output[0])[0])

        last = self._decoder if self._features.takes_final_norm else self._layers[-1]
        return last.register_forward_hook(after)

    def _reduced(self, taps: Tensor) -> Tensor:
        """Reduces taps as FeatureReduction does, with native kernels if the layers use them: [num_rows, width]."""
        if self._native_layers is None:
            return self._features(taps)
        layers, reduction = self._native_layers, self._packed
        kernels, taps, size = layers.kernels, taps.contiguous(), reduction.hidden_size
        if (blob := reduction.blobs.get("reduction.tap_norms")) is not None:
            parts = [part.contiguous() for part in taps.split(size, dim=1)]
            for part, weight in zip(parts, torch.from_numpy(blob).view(torch.float32).view(-1, size), strict=True):
                rms_norm(kernels, part, weight, reduction.epsilon, part)
            taps = torch.cat(parts, dim=1)
        if (blob := reduction.blobs.get("reduction.norm")) is not None:
            rms_norm(kernels, taps, torch.from_numpy(blob).view(torch.float32), reduction.epsilon, taps)
        if not reduction.projection.packed:
            return taps
        features = taps.new_empty((len(taps), reduction.width))
        linear(kernels, layers.workspace, reduction.projection, taps, features)
        return features


def layers_of(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """Returns the layers of a transformers decoder, in order. Raises: ModelError if there is no such list."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ModelError(f"{type(decoder).__name__} has no list of {num_layers} layers to read or divide")
