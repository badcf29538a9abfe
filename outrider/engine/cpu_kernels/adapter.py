"""Packs an adapter (LoRA) for a native decoder. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof

import numpy as np

from outrider.engine.cpu_kernels.decoder_weights import LAYER_MATRICES, DecoderShape
from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.matrices import PANEL
from outrider.engine.low_rank import LowRank, LowRanks
from outrider.errors import ModelError

MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The layers that are joined in each matrix. The panels of gate and up alternate."""


class NativeAdapter:
    """An adapter for decoders of one shape."""

    def __init__(self, shape: DecoderShape, parts: LowRanks) -> None:
        """Raises: ModelError if the adapter changes a layer that the decoder does not have, or one of another size."""
        self._arrays: list[np.ndarray] = []  # keeps the structures' memory alive
        left = dict(parts)
        self._layers = (structures.OutriderLayerAdapter * shape.num_layers)()
        for index in range(shape.num_layers):
            for matrix in LAYER_MATRICES:
                names = [f"model.layers.{index}.{module}" for module in MODULES[matrix]]
                sizes = _sizes(shape, f"{index}.{matrix}")
                found = [left.pop(name, None) for name in names]
                for name, part, size in zip(names, found, sizes, strict=True):
                    _check(name, part, size)
                packed = self._pack(found, [size[0] for size in sizes], interleave=matrix == "gate_up")
                setattr(self._layers[index], matrix, packed)
        if left:
            raise ModelError(f"the adapter changes {min(left)}, which the model does not have")

    @property
    def address(self) -> int:
        """Implements `PackedAdapter`."""
        return addressof(self._layers)

    def _pack(self, parts: Sequence[LowRank | None], sizes: Sequence[int], *, interleave: bool) -> Structure:
        """Packs the parts of joined layers, of `sizes` output features, into an OutriderLowRank."""
        if not any(parts):
            return structures.OutriderLowRank()
        panels: list[list[tuple[np.ndarray, int]]] = []  # by layer: (each panel [rank, PANEL], its first component)
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            up = np.zeros((size, 0), np.float32) if part is None else part.up
            padded = np.pad(up, ((0, -size % PANEL), (0, 0)))
            panels.append([(panel.T, first) for panel in padded.reshape(len(padded) // PANEL, PANEL, up.shape[1])])
            first += up.shape[1]
        ordered = [panel for each in (zip(*panels, strict=True) if interleave else panels) for panel in each]
        arrays = (
            np.concatenate([part.down for part in parts if part is not None], dtype=np.float32),
            np.ascontiguousarray(np.concatenate([panel for panel, _ in ordered], dtype=np.float32)),
            np.cumsum([0, *(len(panel) for panel, _ in ordered)], dtype=np.int32),
            np.asarray([start for _, start in ordered], dtype=np.int32),
        )
        self._arrays += arrays
        return structures.OutriderLowRank(*map(address_of, arrays), first)


def _sizes(shape: DecoderShape, name: str) -> list[tuple[int, int]]:
    """Returns (out_features, in_features) of each layer that is joined in the matrix."""
    total, in_features = shape.matrix_sizes[name]
    outputs = {
        "qkv": [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)],
        "gate_up": [shape.intermediate_size] * 2,
    }.get(name.partition(".")[2], [total])
    return [(out_features, in_features) for out_features in outputs]


def _check(name: str, part: LowRank | None, size: tuple[int, int]) -> None:
    if part is not None and (len(part.up), part.down.shape[1]) != size:
        found = f"{part.down.shape[1]} to {len(part.up)}"
        raise ModelError(f"the adapter's {name} maps {found} features, the model's {size[1]} to {size[0]}")
