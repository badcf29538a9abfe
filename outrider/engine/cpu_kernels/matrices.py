"""Weights in the kernels' layout, in huge pages if the system has them. Torch-free.

Plain weights are `Words`: numpy's float32, or uint16 for bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import from_bfloat16
from outrider.engine.cpu_kernels.group_packing import PANEL, PackedFormat, in_one_format
from outrider.engine.cpu_kernels.group_quantisation import quantise_groups
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors
from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.kv_cache.array_plane import Words
from outrider.errors import ModelError

Floats = npt.NDArray[np.float32]

WORD_TYPES = {np.dtype(np.float32): ElementType.FLOAT32, np.dtype(np.uint16): ElementType.BFLOAT16}

_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 4096
_NO_FACTORS = GroupFactors(np.empty((0, 0), np.float16))


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """W and b of y = x Wᵀ + b."""

    weight: Words | GroupedWeight  # [out_features, in_features]
    bias: Words | None = None  # [out_features]


class WeightArena:
    """Memory for many matrices, allocated in chunks large enough for huge pages.

    The unused part of a chunk costs address space only.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocates an array of zeros, [num_bytes] uint8, which keeps its chunk alive."""
        if self._used + num_bytes > self._chunk.size:
            size = -(-max(num_bytes, _CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # the system has no huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = np.frombuffer(memory, dtype=np.uint8)
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


class PackedMatrix:
    """W and b of y = x W^T + b, packed for the kernels, without a plain copy of W."""

    def __init__(
        self,
        kernels: CpuKernels,
        arena: WeightArena,
        linears: Sequence[PlainLinear],
        *,
        interleave: bool = False,
        quantise: str = "",
    ) -> None:
        """Packs several linear layers into one matrix.

        Args:
            kernels: the kernels that pack the weights and later multiply by them.
            arena: allocates the packed weights.
            linears: layers with the same input, all plain with one type or all quantised.
            interleave: whether the panels of two layers, gate and up, alternate.
            quantise: "int8" rounds plain weights to 8 bits with one scale per output feature, and "int4" to 4 bits (see
                quantise_groups); "": plain weights stay as they are.

        Raises:
            ModelError: if the weights do not fit into one matrix.
        """
        self._functions = kernels.library.functions
        self._arena = arena
        self.in_features = linears[0].weight.shape[1]
        for linear in linears:
            shape = linear.weight.shape
            if shape[1:] != (self.in_features,) or (linear.bias is not None and linear.bias.shape != shape[:1]):
                raise ModelError(
                    f"a weight of {shape} does not fit beside one of {linears[0].weight.shape}, or its bias"
                )
        sizes = [linear.weight.shape[0] for linear in linears]
        self._rooms = [-(-size // PANEL) * PANEL for size in sizes] if interleave else sizes
        self.out_features = sum(self._rooms)
        self._order = _interleaved(self.out_features) if interleave else None
        self.scales: Floats | None = None
        plain = [linear.weight for linear in linears if not isinstance(linear.weight, GroupedWeight)]
        grouped = [linear.weight for linear in linears if isinstance(linear.weight, GroupedWeight)]
        if plain and grouped:
            raise ModelError(
                "of weights that are multiplied together, some are quantised and others are not: set model.weights to "
                "dequantized"
            )
        if quantise == "int4" and plain:
            grouped = [quantise_groups(to_float32(weight)) for weight in plain]
        if grouped:
            self.format, grouped = in_one_format(grouped)
            self.packed = self._pack_grouped(self._joined(grouped))
        elif quantise == "int8":
            self.format = PackedFormat(ElementType.INT8)
            codes, scales = zip(*map(quantise_rows, plain), strict=True)
            self.scales = self._stacked(scales)
            self.packed = self._pack_grouped(GroupedWeight(self._stacked(codes), self.in_features, _NO_FACTORS))
        else:
            self.format = PackedFormat(WORD_TYPES[plain[0].dtype])
            self.packed = self._pack_plain(kernels, plain)
        self.bias: Floats | None = None
        if any(linear.bias is not None for linear in linears):
            none = np.zeros(self.out_features, np.float32)
            biases = [none[: each.weight.shape[0]] if each.bias is None else to_float32(each.bias) for each in linears]
            self.bias = self._stacked(biases)
        self.struct = structures.OutriderMatrix(
            *map(address_of, (self.packed, self.bias, self.scales)),
            self.out_features,
            self.in_features,
            self.format.type,
            self.format.unit_size,
        )

    def _stacked(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Returns the layers' rows in the matrix's order: [out_features, …]. Rows that pad a layer are zeros."""
        padded = [
            np.pad(part, ((0, room - len(part)), *[(0, 0)] * (part.ndim - 1))) if room > len(part) else part
            for part, room in zip(parts, self._rooms, strict=True)
        ]
        together = padded[0] if len(padded) == 1 else np.concatenate(padded)
        return np.ascontiguousarray(together if self._order is None else together[self._order])

    def _joined(self, weights: Sequence[GroupedWeight]) -> GroupedWeight:
        def joined(factors: Sequence[GroupFactors]) -> GroupFactors:
            steps = [each.steps for each in factors if each.steps is not None]
            return GroupFactors(
                self._stacked([each.units for each in factors]), self._stacked(steps) if steps else None
            )

        minima = [weight.minima for weight in weights if weight.minima is not None]
        codes, scales = [weight.codes for weight in weights], [weight.scales for weight in weights]
        return GroupedWeight(
            self._stacked(codes), weights[0].group_size, joined(scales), joined(minima) if minima else None
        )

    def _pack_grouped(self, weight: GroupedWeight) -> npt.NDArray[np.uint8]:
        num_panels = -(-self.out_features // PANEL)
        packed = self._arena.take(num_panels * self.format.panel_bytes(self.in_features))
        self.format.pack(weight, self._functions.outrider_code_offset(), packed)
        return packed

    def _pack_plain(self, kernels: CpuKernels, weights: Sequence[Words]) -> npt.NDArray[np.uint8]:
        sizes = self.out_features, self.in_features
        packed = self._arena.take(self._functions.outrider_packed_size(self.format.type, *sizes))
        first = 0
        for weight, room in zip(weights, self._rooms, strict=True):
            plain = np.ascontiguousarray(weight)
            interleave = int(self._order is not None)
            self._functions.outrider_pack(
                kernels.team, self.format.type, plain.ctypes.data, first, len(plain), *sizes, interleave,
                packed.ctypes.data,
            )  # fmt: skip
            first += room
        return packed

    def row(self, index: int) -> Floats:
        """Unpacks one row of W: [in_features]."""
        plain = np.empty(self.in_features, np.float32)
        self._functions.outrider_unpack_row(ctypes.byref(self.struct), index, plain.ctypes.data)
        return plain


def to_float32(words: Words) -> Floats:
    """Converts the words to float32, exactly."""
    return words if words.dtype == np.float32 else from_bfloat16(words)


def quantise_rows(weight: Words) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantises rows to symmetric int8: [n, k] → ([n, k] int8, [n] float32 scales).

    The value with the largest magnitude in each row becomes 127 or -127.
    """
    values = to_float32(weight)
    scales = np.maximum(np.abs(values).max(axis=1) / np.float32(127), np.finfo(np.float32).tiny)
    return np.clip(np.rint(values / scales[:, None]), -127, 127).astype(np.int8), scales


def rounded_weight(weight: Words, quantise: str) -> Floats:
    """Returns plain weights as a PackedMatrix made with `quantise` holds them: [out_features, in_features]."""
    if quantise == "int4":
        return quantise_groups(to_float32(weight)).dequantise()
    codes, scales = quantise_rows(weight)
    return codes * scales[:, None]


def _interleaved(out_features: int) -> npt.NDArray[np.int64]:
    """Returns the order of features in which panels of two padded halves alternate: [out_features]."""
    return np.arange(out_features).reshape(2, -1, PANEL).swapaxes(0, 1).reshape(-1)
