"""Weights in the kernels' layout, in huge pages if the system has them. Torch-free.

Plain weights are `Words`: numpy's float32, or uint16 for bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import from_bfloat16
from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.kv_cache.array_plane import Words

Floats = npt.NDArray[np.float32]

WORD_TYPES = {np.dtype(np.float32): ElementType.FLOAT32, np.dtype(np.uint16): ElementType.BFLOAT16}
PANEL = 16
"""Number of output features in a panel. Interleaved halves alternate panel by panel."""

_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """W and b of y = x Wᵀ + b."""

    weight: Words  # [out_features, in_features]
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
        quantise: bool = False,
    ) -> None:
        """Packs several linear layers into one matrix.

        Args:
            kernels: the kernels that pack the weights and later multiply by them.
            arena: allocates the packed weights.
            linears: layers with the same input and type.
            interleave: whether the panels of two layers, gate and up, alternate.
            quantise: store weights as int8 with one scale per output feature, and multiply with int8 rows (lossy).
        """
        self._functions = kernels.library.functions
        self.in_features = linears[0].weight.shape[1]
        sizes = [linear.weight.shape[0] for linear in linears]
        padded = [-(-size // PANEL) * PANEL for size in sizes] if interleave else sizes
        self.out_features = sum(padded)
        self.type = ElementType.INT8 if quantise else WORD_TYPES[linears[0].weight.dtype]
        self.packed = arena.take(self._functions.outrider_packed_size(self.type, self.out_features, self.in_features))
        scales = np.ones(self.out_features, np.float32)
        bias = np.zeros(self.out_features, np.float32)
        first = 0
        for linear, size, room in zip(linears, sizes, padded, strict=True):
            plain = np.ascontiguousarray(linear.weight)
            if quantise:
                plain, scale = quantise_rows(plain)
                scales[first : first + size] = scale
            self._functions.outrider_pack(
                kernels.team,
                self.type,
                plain.ctypes.data,
                first,
                size,
                self.out_features,
                self.in_features,
                int(interleave),
                self.packed.ctypes.data,
            )
            if linear.bias is not None:
                bias[first : first + size] = to_float32(linear.bias)
            first += room
        order = _interleaved(self.out_features) if interleave else slice(None)
        has_bias = any(linear.bias is not None for linear in linears)
        self.bias = np.ascontiguousarray(bias[order]) if has_bias else None
        self.scales = np.ascontiguousarray(scales[order]) if quantise else None
        self.struct = structures.OutriderMatrix(
            *map(address_of, (self.packed, self.bias, self.scales)), self.out_features, self.in_features, self.type
        )

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


def _interleaved(out_features: int) -> npt.NDArray[np.int64]:
    """Returns the order of features in which panels of two padded halves alternate: [out_features]."""
    return np.arange(out_features).reshape(2, -1, PANEL).swapaxes(0, 1).reshape(-1)
