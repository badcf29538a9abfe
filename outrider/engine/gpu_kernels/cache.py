"""New keys and values of one layer to their slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_rows(
    keys,  # [num_rows, NUM_HEADS, HEAD], a head's numbers side by side
    values,  # same
    key_cache,  # [num_slots, NUM_HEADS, HEAD]
    value_cache,  # same
    slots,  # [num_rows] int64
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD: tl.constexpr,  # head_dim
    WIDTH: tl.constexpr,  # the power of two from NUM_HEADS * HEAD on
):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    is_there = places < NUM_HEADS * HEAD
    head, dim = places // HEAD, places % HEAD
    to = tl.load(slots + row) * (NUM_HEADS * HEAD) + places
    key = tl.load(keys + row * key_row_stride + head * key_head_stride + dim, mask=is_there)
    value = tl.load(values + row * value_row_stride + head * value_head_stride + dim, mask=is_there)
    tl.store(key_cache + to, key, mask=is_there)
    tl.store(value_cache + to, value, mask=is_there)


def store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes rows to slots of the caches of one layer.

    Args:
        keys: [num_rows, num_kv_heads, head_dim]; of any strides, but a head's numbers side by side are cheapest.
        values: same.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, of their dtype.
        value_cache: same.
        slots: [num_rows] int64. Of rows with the same slot, any may be what stays.
    """
    num_rows, num_heads, head_dim = keys.shape
    keys, values = (each if each.stride(2) == 1 else each.contiguous() for each in (keys, values))
    with torch.cuda.device_of(keys):  # where triton launches
        store_rows[(num_rows,)](
            keys, values, key_cache, value_cache, slots,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            NUM_HEADS=num_heads, HEAD=head_dim, WIDTH=triton.next_power_of_2(num_heads * head_dim),
        )  # fmt: skip
