"""The functions of source/api.h applied to torch tensors, and comparisons of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.native import attention_struct
from outrider.engine.cpu_kernels import operators
from outrider.engine.cpu_kernels.decoder import batch_struct
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.matrices import PackedMatrix, WeightArena
from outrider.engine.input_batch import InputBatch

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def pack(
    kernels: CpuKernels, weights: list[Tensor], biases: list[Tensor | None] | None = None, **options: Any
) -> PackedMatrix:
    plain = map(operators.plain_linear, weights, biases or [None] * len(weights))
    return PackedMatrix(kernels, WeightArena(), [*plain], **options)


def linear(kernels: CpuKernels, matrix: PackedMatrix, x: Tensor) -> Tensor:
    """Multiplies x, [num_rows, in_features] float32 or bfloat16, into guarded memory: [num_rows, out_features]."""
    y = guarded((len(x), matrix.out_features), x.dtype)
    operators.linear(kernels, Workspace(kernels.library), matrix.struct, guarded_copy(x), y)
    return checked(y)


def rms_norm(kernels: CpuKernels, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalises x: [num_rows, width]. `weight`: [width] float32."""
    y = guarded(x.shape, x.dtype)
    operators.rms_norm(kernels, guarded_copy(x), weight, epsilon, y)
    return checked(y)


def paged_attention(
    kernels: CpuKernels,
    query: Tensor,  # [num_rows, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    batch: InputBatch,
    options: AttentionOptions,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """Copies the caches into panels, and returns the kernel's output: [num_rows, num_heads, head_dim]."""
    y = guarded((*query.shape[:2], options.latent_dim or query.shape[2]), query.dtype)
    keys, values = in_panels(kernels, key_cache), in_panels(kernels, value_cache, are_values=True)
    workspace, struct = workspace or Workspace(kernels.library), attention_struct(query, keys, options)
    query = guarded_copy(query)
    operators.paged_attention(kernels, workspace, batch_struct(batch), struct, query, keys, values, y)
    return checked(y)


def in_panels(kernels: CpuKernels, cache: Tensor, *, are_values: bool = False) -> np.ndarray:
    """Returns panels, 64-byte aligned, of a cache [num_blocks, block_size, num_kv_heads, head_dim]; padding is NaN."""
    rows = cache.flatten(0, 1)
    num_panels, (num_heads, head_dim) = -(-len(rows) // 16), rows.shape[1:]
    shape = (num_panels, num_heads, 16 * head_dim * cache.element_size())
    memory = np.full(int(np.prod(shape)) + 64, 0xFF, dtype=np.uint8)
    panels = memory[-memory.ctypes.data % 64 :][: int(np.prod(shape))].reshape(shape)
    operators.write_rows(kernels, rows, panels, torch.arange(len(rows)), are_values=are_values)
    return panels


# ---- memory with margins that show writes out of bounds

_MARGIN = 64
_MARK = 3.0e4


def guarded(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns NaN between margins that `checked` inspects, at an address that is no multiple of a vector's size."""
    count = int(torch.Size(shape).numel())
    memory = torch.full((count + 2 * _MARGIN + 1,), _MARK, dtype=dtype)
    inside = memory[_MARGIN + 1 : _MARGIN + 1 + count]
    inside.fill_(float("nan"))
    return inside.view(shape)


def guarded_copy(values: Tensor) -> Tensor:
    return guarded(values.shape, values.dtype).copy_(values)


def checked(inside: Tensor) -> Tensor:
    """Asserts that nothing was written into the margins, and returns a copy."""
    storage = torch.empty(0, dtype=inside.dtype).set_(inside.untyped_storage())
    assert bool((storage[: _MARGIN + 1] == _MARK).all()), "written before the first element"
    assert bool((storage[-_MARGIN:] == _MARK).all()), "written behind the last element"
    return inside.clone()


# ---- comparing


def bits(values: Tensor) -> Tensor:
    """Returns the bits as integers, so that -0 differs from 0, and NaN equals NaN."""
    return values.contiguous().view(BITS[values.dtype])


def differing_rows(left: Tensor, right: Tensor) -> list[int]:
    """Returns the indices of rows that differ in at least one bit."""
    assert left.shape == right.shape
    unequal = bits(left) != bits(right)
    return unequal.flatten(1).any(dim=1).nonzero().flatten().tolist()


def rounding_of(dtype: torch.dtype) -> float:
    """Returns the largest relative error of rounding to this type: half a unit in the last place."""
    return torch.finfo(dtype).eps / 2


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    excess = (actual.double() - expected).abs() - allowed
    assert bool((excess <= 0).all()), f"{float(excess.max())} more than rounding explains"
