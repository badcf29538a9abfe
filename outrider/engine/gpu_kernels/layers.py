"""Linear layers whose rows have the same bits in any batch, because one configuration serves any number of rows.

A product first sums over the input features of each split of SPLIT_FEATURES, starting at 0, and then over the splits in
order. If there are many rows, one program does both, otherwise `merge_products` adds the splits by the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile sizes. Changing one may change the exact bits of a row's result."""

    rows: int = 32
    outputs: int = 64
    features: int = 64  # in a block
    split_features: int = 1024  # a multiple of `features`
    num_warps: int = 4
    num_stages: int = 3


PRODUCT_TILE = ProductTile()
_MAX_SPLIT_ROWS = 64
"""Maximum number of rows for which products are split. More rows give enough tiles to fill a GPU, so that splits would
only cost memory."""


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    rows,  # [num_rows, num_features]
    weight,  # [num_outputs, num_features]
    bias,  # [num_outputs]; used if HAS_BIAS
    output,  # [num_rows, num_outputs]
    parts,  # [num_splits, num_rows, num_outputs] float32; used if IS_SPLIT
    num_rows,
    num_outputs,
    num_features,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    SPLIT_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Computes rows · weight^T + bias. Grid: tiles of outputs, tiles of rows, splits (1 unless IS_SPLIT)."""
    own_outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own_rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output = own_outputs < num_outputs
    is_row = own_rows < num_rows
    row_starts = own_rows.to(tl.int64) * num_features
    output_starts = own_outputs.to(tl.int64) * num_features
    first_split = 0
    end_split = (num_features + SPLIT_FEATURES - 1) // SPLIT_FEATURES
    if IS_SPLIT:
        first_split = tl.program_id(2)
        end_split = first_split + 1
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for split in range(first_split, end_split):
        part = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(split * SPLIT_FEATURES, tl.minimum((split + 1) * SPLIT_FEATURES, num_features), FEATURES):
            features = start + tl.arange(0, FEATURES)
            is_feature = features < num_features
            left = tl.load(
                rows + row_starts[:, None] + features[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0
            )
            right = tl.load(
                weight + output_starts[None, :] + features[:, None],
                mask=is_feature[:, None] & is_output[None, :],
                other=0.0,
            )
            part = tl.dot(left, right, part, input_precision="ieee")
        total += part
    places = own_rows[:, None].to(tl.int64) * num_outputs + own_outputs[None, :]
    is_place = is_row[:, None] & is_output[None, :]
    if IS_SPLIT:
        split_start = tl.program_id(2).to(tl.int64) * num_rows * num_outputs
        tl.store(parts + split_start + places, total, mask=is_place)
    else:
        if HAS_BIAS:
            total += tl.load(bias + own_outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(output + places, total.to(output.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_products(
    parts,  # [num_splits, num_rows, num_outputs] float32
    bias,  # [num_outputs]; used if HAS_BIAS
    output,  # [num_rows, num_outputs]
    num_splits,
    num_rows,
    num_outputs,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Adds the partial products of the splits, in order. Grid: blocks of outputs, rows."""
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        start = (split * num_rows + row).to(tl.int64) * num_outputs
        total += tl.load(parts + start + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + row.to(tl.int64) * num_outputs + outputs, total.to(output.dtype.element_ty), mask=is_output)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns rows · weight^T + bias, all of one dtype.

    [num_rows, num_features], [num_outputs, num_features], [num_outputs] -> [num_rows, num_outputs]; inputs contiguous.
    """
    tile = PRODUCT_TILE
    num_rows, num_features = rows.shape
    num_outputs = len(weight)
    output = torch.empty((num_rows, num_outputs), dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return output
    num_splits = -(-num_features // tile.split_features)
    is_split = num_splits > 1 and num_rows <= _MAX_SPLIT_ROWS
    parts = output
    if is_split:
        parts = torch.empty((num_splits, num_rows, num_outputs), dtype=torch.float32, device=rows.device)
    grid = (-(-num_outputs // tile.outputs), -(-num_rows // tile.rows), num_splits if is_split else 1)
    with torch.cuda.device_of(rows):  # triton launches on the current device
        multiply[grid](
            rows, weight, weight if bias is None else bias, output, parts, num_rows, num_outputs, num_features,
            ROWS=tile.rows, OUTPUTS=tile.outputs, FEATURES=tile.features, SPLIT_FEATURES=tile.split_features,
            HAS_BIAS=bias is not None, IS_SPLIT=is_split,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        if is_split:
            merge_products[-(-num_outputs // 256), num_rows](
                parts, weight if bias is None else bias, output, num_splits, num_rows, num_outputs,
                BLOCK=256, HAS_BIAS=bias is not None, enable_fp_fusion=False,
            )  # fmt: skip
    return output
