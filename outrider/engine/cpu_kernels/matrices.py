"""Weights in the layout of the kernels, in memory made of huge pages where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType, MatrixStruct

ELEMENT_TYPES = {torch.float32: ElementType.FLOAT32, torch.bfloat16: ElementType.BFLOAT16}
PANEL = 16
"""Output features of a panel: what interleaved halves alternate by."""

_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 4096


class WeightArena:
    """Memory for many matrices, taken from the system in chunks large enough for huge pages.

    A chunk's untouched rest costs address space only.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of zeros; keeps its chunk alive."""
        if self._used + num_bytes > self._chunk.numel():
            size = -(-max(num_bytes, _CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


class PackedMatrix:
    """W and b of y = x W^T + b, packed for the kernels. Holds no plain copy of W."""

    def __init__(
        self,
        kernels: CpuKernels,
        arena: WeightArena,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        *,
        interleave: bool = False,
        quantise: bool = False,
    ) -> None:
        """Several weights become one matrix, computed at once.

        Args:
            kernels: pack and later multiply.
            arena: where the packed weights lie.
            weights: each [out_features_i, in_features], float32 or bfloat16, all alike.
            biases: as many, each [out_features_i] or None.
            interleave: two weights, gate and up, whose panels alternate.
            quantise: keep weights as int8 with one scale for each output feature, and multiply with int8 rows (lossy).
        """
        self._functions = kernels.library.functions
        self.in_features = weights[0].shape[1]
        sizes = [weight.shape[0] for weight in weights]
        padded = [-(-size // PANEL) * PANEL for size in sizes] if interleave else sizes
        self.out_features = sum(padded)
        self.type = ElementType.INT8 if quantise else ELEMENT_TYPES[weights[0].dtype]
        self.packed = arena.take(self._functions.outrider_packed_size(self.type, self.out_features, self.in_features))
        scales = torch.ones(self.out_features)
        bias = torch.zeros(self.out_features)
        first = 0
        for index, (weight, size, room) in enumerate(zip(weights, sizes, padded, strict=True)):
            plain = weight.detach().contiguous()
            if quantise:
                plain, scale = quantise_rows(plain)
                scales[first : first + size] = scale
            self._functions.outrider_pack(
                kernels.team.handle,
                self.type,
                plain.data_ptr(),
                first,
                size,
                self.out_features,
                self.in_features,
                int(interleave),
                self.packed.data_ptr(),
            )
            if biases and (own := biases[index]) is not None:
                bias[first : first + size] = own.detach().float()
            first += room
        order = _interleaved(self.out_features) if interleave else slice(None)
        has_bias = any(own is not None for own in biases)
        self.bias = bias[order].contiguous() if has_bias else None
        self.scales = scales[order].contiguous() if quantise else None
        self.struct = MatrixStruct(
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            self.out_features,
            self.in_features,
            self.type,
        )

    def row(self, index: int) -> Tensor:
        """One row of W as it was packed: [in_features] float32."""
        plain = torch.empty(self.in_features)
        self._functions.outrider_unpack_row(ctypes.byref(self.struct), index, plain.data_ptr())
        return plain


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 for each row: [n, k] → ([n, k] int8, [n] float32 scales). The largest becomes ±127."""
    scales = (weight.float().abs().amax(dim=1) / 127.0).clamp_min(torch.finfo(torch.float32).tiny)
    quantised = torch.round(weight.float() / scales.unsqueeze(1)).clamp(-127, 127).to(torch.int8)
    return quantised.contiguous(), scales


def _interleaved(out_features: int) -> Tensor:
    """Where the features of two padded halves lie once their panels alternate: [out_features] int64."""
    panels = torch.arange(out_features).view(2, -1, PANEL)
    return panels.transpose(0, 1).reshape(-1)
