"""min_p, top_k and top_p of whole rows in one launch: the order key of the last token that they keep.

What they keep is a beginning of the tokens' order (see `outrider.engine.sampler.filters`). Its end is found without
sorting: a search by three bits of a token's order at a time, each time over the whole row, then the id among equal
values. Weights are counts or masses, integers both, so that the order of sums does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.gpu_kernels.elementary import masses_of, order_keys, order_of, value_of

CHUNK = 1024
"""Tokens that a program takes at once."""
NUM_WARPS = 8
_LOWEST_KEY = tl.constexpr(-0x8000000000000000)
_LOWEST_ORDER = tl.constexpr(-0x80000000)
_ROUNDS = tl.constexpr(11)  # 32 bits, three at a time


@triton.jit
def _tokens(values, start, num_ids, temperature, CHUNK: tl.constexpr):
    """Values after step 5, their orders and ids, and which there are: each [CHUNK]."""
    ids = start + tl.arange(0, CHUNK)
    is_there = ids < num_ids
    own = tl.div_rn(tl.load(values + ids, mask=is_there, other=float("-inf")), temperature)
    return own, order_of(own), ids, is_there


@triton.jit
def _weights(own, order, ids, is_there, largest, limit, IS_MASS: tl.constexpr):
    """Counts as int32, or masses as int64 of what is kept so far."""
    if IS_MASS:
        return tl.where(is_there & (order_keys(order, ids) >= limit), masses_of(own, largest), 0)
    else:  # noqa: RET505 - a branch that is not compiled
        return is_there.to(tl.int32)


@triton.jit
def _last_kept(
    values, num_ids, temperature, largest, limit, wanted, CHUNK: tl.constexpr, IS_MASS: tl.constexpr
):  # fmt: skip
    """The key of the token with which the weight from the first token on reaches `wanted`, which all tokens do."""
    digits = tl.arange(0, 8)
    order = tl.full([], _LOWEST_ORDER, tl.int32)
    above = wanted * 0  # weight of the tokens beyond those that are searched
    for round_ in range(_ROUNDS):
        shift = tl.maximum(29 - 3 * round_, 0)
        bounds = order + (digits << shift)
        sums = tl.zeros([CHUNK, 8], tl.int64 if IS_MASS else tl.int32)
        for start in range(0, num_ids, CHUNK):
            own, own_order, ids, is_there = _tokens(values, start, num_ids, temperature, CHUNK)
            weights = _weights(own, own_order, ids, is_there, largest, limit, IS_MASS)
            sums += tl.where(own_order[:, None] >= bounds[None, :], weights[:, None], 0)
        totals = tl.sum(sums, axis=0).to(tl.int64)  # falling
        digit = tl.sum((totals >= wanted).to(tl.int32), axis=0) - 1
        beyond = tl.sum(tl.where(digits == digit + 1, totals, 0), axis=0)
        above = tl.where(digit < 7, beyond, above)
        order += digit << shift
    number = wanted - above
    if IS_MASS:  # of tokens that weigh the same
        weight = masses_of(value_of(order), largest)
        number = (number + weight - 1) // weight
    seen = number * 0
    last_id = 0
    for start in range(0, num_ids, CHUNK):
        _, own_order, ids, is_there = _tokens(values, start, num_ids, temperature, CHUNK)
        is_equal = (is_there & (own_order == order)).to(tl.int32)
        places = seen + tl.cumsum(is_equal, axis=0)
        last_id += tl.sum(tl.where((is_equal > 0) & (places == number), ids, 0), axis=0)
        seen += tl.sum(is_equal, axis=0)
    return order_keys(order, last_id)


@triton.jit(do_not_specialize=["row_stride", "num_ids", "num_rows"])
def filter_limits(
    values,  # [num_rows, num_ids] float32 after step 4, rows `row_stride` apart
    table,  # [8, num_rows] int64, see DecisionTable
    limits,  # [num_rows] int64
    row_stride,
    num_ids,
    num_rows,
    CHUNK: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
):
    """Grid: rows. Rows without filters, and those with NaN, which the race decides, keep all."""
    row = tl.program_id(0)
    temperature = tl.load(table + 4 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    log_min_p = tl.load(table + 5 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.load(table + 6 * num_rows + row)
    top_p = tl.load(table + 7 * num_rows + row).to(tl.float64, bitcast=True)
    limit = tl.full([], _LOWEST_KEY, tl.int64)
    has_filters = (log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1.0)
    if (temperature == 0.0) | (has_filters == 0):
        tl.store(limits + row, limit)
        return

    values += row.to(tl.int64) * row_stride
    highest = tl.full([CHUNK], _LOWEST_ORDER, tl.int32)
    is_nan = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_ids, CHUNK):
        own, order, ids, is_there = _tokens(values, start, num_ids, temperature, CHUNK)
        highest = tl.maximum(highest, tl.where(is_there, order, _LOWEST_ORDER))
        is_nan |= (own != own).to(tl.int32)  # noqa: PLR0124
    if tl.max(is_nan, axis=0) > 0:
        tl.store(limits + row, limit)
        return

    largest = value_of(tl.max(highest, axis=0))
    if log_min_p > float("-inf"):
        limit = order_of(largest + log_min_p).to(tl.int64) << 32
    if HAS_TOP_K:  # noqa: SIM102 - decided when it is compiled
        if top_k > 0:
            limit = tl.maximum(
                limit, _last_kept(values, num_ids, temperature, largest, limit, top_k, CHUNK, IS_MASS=False)
            )
    if HAS_TOP_P:  # noqa: SIM102
        if top_p < 1.0:
            masses = tl.zeros([CHUNK], tl.int64)
            for start in range(0, num_ids, CHUNK):
                own, order, ids, is_there = _tokens(values, start, num_ids, temperature, CHUNK)
                masses += _weights(own, order, ids, is_there, largest, limit, IS_MASS=True)
            total = tl.sum(masses, axis=0)
            wanted = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            if total >= wanted:
                limit = _last_kept(values, num_ids, temperature, largest, limit, wanted, CHUNK, IS_MASS=True)
    tl.store(limits + row, limit)


def limits_of(values: Tensor, table: Tensor, *, has_top_k: bool, has_top_p: bool) -> Tensor:
    """The order key of the last token that min_p, top_k and top_p keep of each row: [num_rows] int64.

    Args:
        values: [num_rows, num_ids] float32 after step 4, a row's side by side.
        table: [8, num_rows] int64, of a `DecisionTable`.
        has_top_k: whether any row has top_k.
        has_top_p: whether any row has top_p.
    """
    num_rows, num_ids = values.shape
    limits = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    with torch.cuda.device_of(values):  # where triton launches
        filter_limits[(num_rows,)](
            values, table, limits, values.stride(0), num_ids, num_rows,
            CHUNK=CHUNK, HAS_TOP_K=has_top_k, HAS_TOP_P=has_top_p, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return limits
