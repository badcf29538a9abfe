"""Products of a mixture of experts, whose rows have the same bits in any batch.

The slots of all rows are sorted by expert, on the device: the grid has as many programs as any choice of experts may
need, so the host does not wait, and CUDA graphs can capture it. A program multiplies rows of one expert, with one sum
for each output, in the order of the features. The slots of a row are added in the router's order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.gpu_kernels.layers import PRODUCT_TILE

SLOTS_BLOCK = 256
"""Number of features of a row that one program of `add_slots` computes."""


class SortedSlots(NamedTuple):
    """The slots of all rows by expert. A slot's number is row * slots per row + its place in the row."""

    order: Tensor  # [num_rows * slots] int64: slots, sorted by expert
    starts: Tensor  # [num_experts + 1] int64: each expert's first slot in `order`
    tile_starts: Tensor  # [num_experts + 1] int64: each expert's first tile; the last number is that of all tiles


@triton.jit
def multiply_by_experts(
    rows,  # [num_slots / DIVISOR, num_features]
    weight,  # [NUM_EXPERTS, num_outputs, num_features], with the strides below
    bias,  # [NUM_EXPERTS, num_outputs]; used if HAS_BIAS
    output,  # [num_slots, num_outputs]
    order,  # these three: see SortedSlots
    starts,
    tile_starts,
    num_outputs,
    num_features,
    expert_stride,
    output_stride,
    feature_stride,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiplies row slot / DIVISOR of each slot by the slot's expert. Grid: tiles of outputs, tiles of slots."""
    tile = tl.program_id(1)
    experts = tl.arange(0, PADDED_EXPERTS)
    is_before = (experts < NUM_EXPERTS) & (tl.load(tile_starts + 1 + experts, mask=experts < NUM_EXPERTS) <= tile)
    expert = tl.sum(is_before.to(tl.int32), 0)
    if expert < NUM_EXPERTS:
        places = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * ROWS + tl.arange(0, ROWS)
        is_row = places < tl.load(starts + expert + 1)
        slots = tl.load(order + places, mask=is_row, other=0)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = outputs < num_outputs
        left_starts = rows + slots // DIVISOR * num_features
        right_starts = weight + expert.to(tl.int64) * expert_stride + outputs.to(tl.int64) * output_stride
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, num_features, FEATURES):
            features = start + tl.arange(0, FEATURES)
            is_feature = features < num_features
            left = tl.load(
                left_starts[:, None] + features[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0
            )
            right = tl.load(
                right_starts[None, :] + features.to(tl.int64)[:, None] * feature_stride,
                mask=is_feature[:, None] & is_output[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(
            output + slots[:, None] * num_outputs + outputs[None, :],
            total.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
        )


@triton.jit
def add_slots(
    products,  # [num_rows * NUM_SLOTS, num_outputs] float32
    expert_ids,  # [num_rows, NUM_SLOTS] int64
    weights,  # [num_rows, NUM_SLOTS] float32
    output,  # [num_rows, num_outputs]
    num_outputs,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a row's weighted slots in their order, without those that have no expert. Grid: blocks of outputs, rows."""
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(NUM_SLOTS):
        slot = row * NUM_SLOTS + place
        expert = tl.load(expert_ids + slot)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            product = tl.load(products + slot * num_outputs + outputs, mask=is_output, other=0.0)
            total += product * tl.load(weights + slot)
    tl.store(output + row * num_outputs + outputs, total.to(output.dtype.element_ty), mask=is_output)


def sort_slots(expert_ids: Tensor, num_experts: int) -> SortedSlots:
    """Sorts the slots of `expert_ids`, [num_rows, slots] int64, without waiting for the device.

    Slots with another id than 0 to num_experts - 1 belong to no expert.
    """
    experts, order = torch.sort(expert_ids.reshape(-1), stable=True)
    starts = torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device))
    num_tiles = torch.diff(starts, prepend=starts[:1]) + (PRODUCT_TILE.rows - 1)
    return SortedSlots(order, starts, torch.cumsum(num_tiles // PRODUCT_TILE.rows, 0))


def max_tiles(num_slots: int, num_experts: int) -> int:
    """Returns the largest number of tiles of any choice of experts: each may have one with a single slot."""
    rows = PRODUCT_TILE.rows
    return (num_slots + min(num_experts, num_slots) * (rows - 1)) // rows


def grouped_linear(
    rows: Tensor, slots: SortedSlots, weight: Tensor, bias: Tensor | None, output: Tensor, *, is_transposed: bool
) -> Tensor:
    """Multiplies the row of each slot by the slot's expert, and returns `output`, [num_slots, num_outputs].

    Args:
        rows: [num_slots, num_features], or [num_rows, num_features] for the same row in all slots; contiguous.
        slots: the slots by expert.
        weight: [num_experts, num_outputs, num_features] of the dtype of `rows`.
        bias: [num_experts, num_outputs].
        output: receives the products. Rows of slots without an expert are left as they are.
        is_transposed: whether the last two dimensions of `weight` are exchanged.
    """
    tile = PRODUCT_TILE
    num_slots, num_outputs = output.shape
    num_experts = len(weight)
    if num_slots == 0:
        return output
    expert_stride, *strides = weight.stride()
    feature_stride, output_stride = strides if is_transposed else strides[::-1]
    with torch.cuda.device_of(rows):  # triton launches on the current device
        multiply_by_experts[-(-num_outputs // tile.outputs), max_tiles(num_slots, num_experts)](
            rows, weight, weight if bias is None else bias, output, *slots, num_outputs, rows.shape[1],
            expert_stride, output_stride, feature_stride,
            NUM_EXPERTS=num_experts, PADDED_EXPERTS=triton.next_power_of_2(num_experts),
            DIVISOR=num_slots // len(rows), ROWS=tile.rows, OUTPUTS=tile.outputs, FEATURES=tile.features,
            HAS_BIAS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
    return output


def sum_of_slots(products: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, output: Tensor) -> Tensor:
    """Adds the slots of each row and returns `output`, [num_rows, num_outputs]. All tensors must be contiguous.

    Args:
        products: [num_rows * slots, num_outputs] float32.
        expert_ids: [num_rows, slots] int64.
        weights: [num_rows, slots] float32, which multiply the products.
        num_experts: the number of experts.
        output: receives the sums, rounded to its dtype.
    """
    num_rows, num_outputs = output.shape
    if num_rows:
        with torch.cuda.device_of(products):
            add_slots[-(-num_outputs // SLOTS_BLOCK), num_rows](
                products, expert_ids, weights, output, num_outputs,
                NUM_EXPERTS=num_experts, NUM_SLOTS=expert_ids.shape[1], BLOCK=SLOTS_BLOCK, enable_fp_fusion=False,
            )  # fmt: skip
    return output
