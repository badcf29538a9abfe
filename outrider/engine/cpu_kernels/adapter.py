"""Packs an adapter (LoRA) for a native decoder. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Structure, addressof, sizeof

import numpy as np

from outrider.engine.cpu_kernels.decoder_weights import DecoderShape
from outrider.engine.cpu_kernels.group_packing import PANEL
from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.matrices import WeightArena
from outrider.engine.cpu_kernels.packing import MATRICES
from outrider.engine.input_batch import InputBatch
from outrider.engine.low_rank import Floats, LowRank, LowRanks, PackedAdapter
from outrider.errors import ModelError


class NativeAdapter(PackedAdapter):
    """An adapter for decoders of one shape."""

    def __init__(self, shape: DecoderShape, parts: LowRanks) -> None:
        """Raises: ModelError if the adapter changes a layer that the decoder does not have, or one of another size."""
        self._arrays: list[np.ndarray] = []  # keeps the structures' memory alive
        self._arena = WeightArena()  # its memory goes back to the system with the adapter
        left = dict(parts)
        self._layers = (structures.OutriderLayerAdapter * shape.num_layers)()
        for index in range(shape.num_layers):
            for matrix, names in MATRICES.items():
                places = {name: f"model.layers.{index}.{name}" for name in names}
                found = {name: left.pop(place) for name, place in places.items() if place in left}
                if len(found) > 1 and names[0] in found:
                    raise ModelError(f"the adapter changes {places[names[0]]} both as a whole and in part")
                outputs, in_features = _sizes(shape, index, matrix)
                for name, part in found.items():
                    is_whole = len(names) == 1 or name == names[0]
                    out_features = sum(outputs) if is_whole else outputs[names.index(name) - 1]
                    _check(places[name], part, out_features, in_features)
                if found:
                    packed = self._pack(found, names, outputs, interleave=matrix == "gate_up")
                    setattr(self._layers[index], matrix, packed)
        if left:
            raise ModelError(f"the adapter changes {min(left)}, which the model does not have")

    @property
    def address(self) -> int:
        """The address of an array of OutriderLayerAdapter, one for each layer of the decoder."""
        return addressof(self._layers)

    @property
    def num_bytes(self) -> int:
        """Implements PackedAdapter.num_bytes."""
        return sizeof(self._layers) + sum(array.nbytes for array in self._arrays)

    def _pack(
        self, found: dict[str, LowRank], names: Sequence[str], outputs: Sequence[int], *, interleave: bool
    ) -> Structure:
        """Packs the parts of one matrix into an OutriderLowRank. `names`: see MATRICES; `outputs`: of its layers."""
        ups: list[Floats] = [np.zeros((size, 0), np.float32) for size in outputs]
        firsts, rank = [0] * len(outputs), 0
        for name, part in found.items():
            if len(names) == 1 or name == names[0]:  # one layer of the model is all that the matrix has
                ups = np.split(part.up, np.cumsum(outputs)[:-1])
            else:
                ups[names.index(name) - 1], firsts[names.index(name) - 1] = part.up, rank
            rank += len(part.down)
        panels = [[(panel, first) for panel in _panels(up)] for up, first in zip(ups, firsts, strict=True)]
        ordered = [panel for each in (zip(*panels, strict=True) if interleave else panels) for panel in each]
        arrays = (
            np.concatenate([part.down for part in found.values()], dtype=np.float32),
            np.ascontiguousarray(np.concatenate([panel for panel, _ in ordered], dtype=np.float32)),
            np.cumsum([0, *(len(panel) for panel, _ in ordered)], dtype=np.int32),
            np.asarray([first for _, first in ordered], dtype=np.int32),
        )
        kept = [self._arena.take(values.nbytes).view(values.dtype) for values in arrays]
        for own, values in zip(kept, arrays, strict=True):
            own[:] = values.ravel()
        self._arrays += kept
        return structures.OutriderLowRank(*map(address_of, kept), rank)


def addresses_of_rows(batch: InputBatch) -> array[int]:
    """Returns the address of each row's adapter, 0 for none: [num_rows] int64; empty if no row has one."""
    addresses, starts = array("q"), batch.arrays.query_start_loc
    for index, adapter in enumerate(batch.adapters):
        assert adapter is None or isinstance(adapter, NativeAdapter)
        address = 0 if adapter is None else adapter.address
        addresses.extend((address,) * (starts[index + 1] - starts[index]))
    return addresses


def _panels(up: Floats) -> list[Floats]:
    """Splits [out_features, rank] into panels [rank, PANEL], the last one padded."""
    padded = np.pad(up, ((0, -len(up) % PANEL), (0, 0)))
    return [panel.T for panel in np.split(padded, len(padded) // PANEL)]


def _sizes(shape: DecoderShape, index: int, matrix: str) -> tuple[list[int], int]:
    """Returns the outputs of each layer of the model that the matrix has, and their number of inputs."""
    size = shape.matrix_sizes[f"{index}.{matrix}"]
    outputs = {
        "qkv": [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)],
        "gate_up": [shape.intermediate_size] * 2,
    }.get(matrix, [size.out_features])
    return outputs, size.in_features


def _check(name: str, part: LowRank, out_features: int, in_features: int) -> None:
    if (len(part.up), part.down.shape[1]) != (out_features, in_features):
        found = f"{part.down.shape[1]} to {len(part.up)}"
        raise ModelError(f"the adapter's {name} maps {found} features, the model's {in_features} to {out_features}")
