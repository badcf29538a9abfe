"""min_p, top_k and top_p of whole rows in three launches, which find the order key of the last token that is kept.

The filters keep a prefix of the tokens' order (see `outrider.engine.sampler.filters`), usually some hundreds of tokens.
So the first step is to find a value that a few thousand tokens reach: ids are divided into LANES classes, and the value
is the smallest of the classes' maxima. The tokens that reach it are listed. The last kept token is found without
sorting, three bits of its key at a time. Each time the whole list is read, or the whole row if the list is too short.
Weights are counts or masses, which are integers, so sums do not depend on the order of the row or of the list.

For each row, programs write to a scratch row of int64, initially 0: the largest order of each class, the number of
listed tokens, the mass of the listed tokens, and the mass of all tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.gpu_kernels.elementary import masses_of, order_keys, order_of, value_of

CHUNK = 1024
"""Number of tokens that a program searches at a time."""
LANES = 512
"""Number of classes of ids. With independent logits, about LANES * log(LANES) tokens are listed."""
SLICES = 4
"""Number of ids of each class that one program reads."""
MAX_LISTED = 8192
"""Maximum number of keys in a row's list."""
NUM_WARPS = 8
_LOWEST_KEY = tl.constexpr(-0x8000000000000000)
_LOWEST_ORDER = tl.constexpr(-0x80000000)
_MINUS_INF = tl.constexpr(-2139095041)  # the order of -inf
_NAN = tl.constexpr(0x7FFFFFFF)  # above the order of every number


@triton.jit
def _settings(table, row, num_rows):
    """Returns one row's temperature, log of min_p, top_k and top_p."""
    temperature = tl.load(table + 4 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    log_min_p = tl.load(table + 5 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.load(table + 6 * num_rows + row)
    top_p = tl.load(table + 7 * num_rows + row).to(tl.float64, bitcast=True)
    return temperature, log_min_p, top_k, top_p


@triton.jit
def _lane_bounds(scratch, log_min_p, LANES: tl.constexpr):
    """Returns the orders of the smallest and the largest class maximum, and the lowest key that min_p keeps."""
    maxima = tl.load(scratch + tl.arange(0, LANES)) + _LOWEST_ORDER
    least, largest = tl.min(maxima, axis=0).to(tl.int32), tl.max(maxima, axis=0).to(tl.int32)
    limit = tl.full([], _LOWEST_KEY, tl.int64)
    if log_min_p > float("-inf"):
        limit = order_of(value_of(largest) + log_min_p).to(tl.int64) << 32
    return least, largest, limit


@triton.jit(do_not_specialize=["num_rows"])
def raise_lanes(
    values,  # [num_rows, num_ids] float32 after step 4 of SamplingParams, rows `row_stride` apart
    table,  # [8, num_rows] int64, see `TritonDecider.table`
    scratch,  # [num_rows, LANES + 3] int64
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Finds the largest order of each class, minus the lowest int32. Grid: rows, chunks of SLICES * LANES ids."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    if (temperature != 0.0) & ((log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1.0)):
        lanes = tl.arange(0, LANES)
        slices = tl.program_id(1) * SLICES + tl.arange(0, SLICES)
        ids = slices[:, None] * LANES + lanes[None, :]
        own = tl.load(values + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
        own = tl.div_rn(own, temperature)
        order = tl.where(own != own, _NAN, order_of(own))  # noqa: PLR0124
        maxima = tl.max(order, axis=0).to(tl.int64) - _LOWEST_ORDER
        tl.atomic_max(scratch + row * (LANES + 3) + lanes, maxima, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def list_tokens(
    values,  # see raise_lanes
    table,
    scratch,
    listed,  # [num_rows, ROOM] int64: order keys, in any order
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Lists tokens that reach the smallest class maximum, and adds up masses of tokens.

    Grid: rows, chunks of SLICES * LANES ids.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    if (temperature == 0.0) | ((top_k == 0) & (top_p >= 1.0)):
        return
    scratch += row * (LANES + 3)
    least, largest, limit = _lane_bounds(scratch, log_min_p, LANES)
    ids = tl.program_id(1) * SLICES * LANES + tl.arange(0, SLICES * LANES)
    own = tl.load(values + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
    own = tl.div_rn(own, temperature)
    order = order_of(own)
    keys = order_keys(order, ids)
    is_kept = (order > _MINUS_INF) & (keys >= limit)
    is_listed = is_kept & (order >= least)
    number = tl.sum(is_listed.to(tl.int32), axis=0)
    if number > 0:
        first = tl.atomic_add(scratch + LANES, number.to(tl.int64), sem="relaxed")
        places = first + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(listed + row * ROOM + places, keys, mask=is_listed & (places < ROOM))
    if top_p < 1.0:
        masses = tl.where(is_kept, masses_of(own, value_of(largest)), 0)
        tl.atomic_add(scratch + LANES + 1, tl.sum(tl.where(is_listed, masses, 0), axis=0), sem="relaxed")
        tl.atomic_add(scratch + LANES + 2, tl.sum(masses, axis=0), sem="relaxed")


@triton.jit
def _share(top_p, total):
    """Returns the mass that top_p keeps; at least 1, so that the first token is kept. Uses float64, as on a CPU."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _last_kept(
    values, listed, num_ids, num_listed, is_reached, temperature, least, highest, limit, wanted, top_p,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, ID_BITS: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """Returns the key of the token at which the total weight of the tokens, largest key first, reaches `wanted`.

    Only tokens with keys of at least `limit` are counted; if their total is below `wanted`, the result is `limit`.

    `is_reached`: whether the tokens with orders of at least `least` suffice; otherwise the whole row is read.
    `wanted`: -1 for the fraction top_p of the total mass of the counted tokens.
    """
    is_listed = is_reached & (num_listed <= ROOM)
    end = tl.where(is_listed, num_listed, num_ids).to(tl.int32)
    lowest = tl.maximum(tl.where(is_reached, least, _LOWEST_ORDER), (limit >> 32).to(tl.int32)).to(tl.int64)
    # The search shortens keys: of their low halves, it keeps only the bits in which ids differ.
    low_half = (tl.full([], 1, tl.int64) << ID_BITS) - 1
    span = ((highest - lowest) << ID_BITS) | low_half
    found = lowest << ID_BITS
    shift = 0
    while (span >> (shift + 3)) > 0:
        shift += 3
    digits = tl.arange(0, 8)
    while shift >= 0:
        bounds = found + (digits.to(tl.int64) << shift)
        sums = tl.zeros([CHUNK, 8], tl.int64)
        for start in range(0, end, CHUNK):
            places = start + tl.arange(0, CHUNK)
            is_there = places < end
            own = tl.load(values + places, mask=is_there & (is_listed == 0), other=float("-inf"))
            keys = order_keys(order_of(tl.div_rn(own, temperature)), places)
            keys = tl.where(is_listed, tl.load(listed + places, mask=is_there & is_listed, other=_LOWEST_KEY), keys)
            order = (keys >> 32).to(tl.int32)
            weights = masses_of(value_of(order), value_of(highest)) if IS_MASS else tl.full([CHUNK], 1, tl.int64)
            weights = tl.where(is_there & (order > _MINUS_INF) & (keys >= limit), weights, 0)
            keys = ((keys >> 32) << ID_BITS) | (keys & low_half)
            sums += tl.where(keys[:, None] >= bounds[None, :], weights[:, None], 0)
        totals = tl.sum(sums, axis=0)  # descending; the first is the weight of all tokens within the limit
        if IS_MASS:
            wanted = tl.where(wanted < 0, _share(top_p, tl.max(totals, axis=0)), wanted)
        found += tl.maximum(tl.sum((totals >= wanted).to(tl.int64), axis=0) - 1, 0) << shift
        shift -= 3
    return tl.maximum(limit, ((found >> ID_BITS) << 32) | (0xFFFFFFFF - low_half) | (found & low_half))


@triton.jit(do_not_specialize=["num_rows"])
def filter_limits(
    values,  # see list_tokens
    table,
    scratch,
    listed,
    limits,  # [num_rows] int64
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    ID_BITS: tl.constexpr,  # number of bits of the largest id
):
    """Finds limits. Grid: rows. A row keeps all tokens if it has no filters, a NaN (left to the race), or only -inf."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    scratch += row * (LANES + 3)
    least, highest, limit = _lane_bounds(scratch, log_min_p, LANES)
    if (temperature == 0.0) | (highest == _NAN) | (highest <= _MINUS_INF):
        tl.store(limits + row, tl.full([], _LOWEST_KEY, tl.int64))
        return

    values += row * row_stride
    listed += row * ROOM
    num_listed = tl.load(scratch + LANES)
    is_all = tl.maximum((limit >> 32).to(tl.int32), _MINUS_INF) >= least  # no token below `least` can be kept
    is_reached = is_all | (num_listed >= top_k)
    if top_k > 0:
        limit = _last_kept(
            values, listed, num_ids, num_listed, is_reached, temperature, least, highest, limit, top_k, top_p,
            ROOM, CHUNK, ID_BITS, IS_MASS=False,
        )  # fmt: skip
    if top_p < 1.0:
        wanted = _share(top_p, tl.load(scratch + LANES + 2))
        if top_k > 0:
            wanted = tl.full([], -1, tl.int64)  # top_p refers to the mass that top_k keeps
        else:
            is_reached = is_all | (tl.load(scratch + LANES + 1) >= wanted)
        limit = _last_kept(
            values, listed, num_ids, num_listed, is_reached, temperature, least, highest, limit, wanted, top_p,
            ROOM, CHUNK, ID_BITS, IS_MASS=True,
        )  # fmt: skip
    tl.store(limits + row, limit)


def limits_of(values: Tensor, table: Tensor) -> Tensor:
    """Returns the order key of the last token that min_p, top_k and top_p keep in each row: [num_rows] int64.

    Tokens at -inf, which are never drawn, may be on either side of the limit.

    Args:
        values: [num_rows, num_ids] float32 after step 4 of SamplingParams, each row contiguous.
        table: [8, num_rows] int64, see `outrider.engine.sampler.triton_decider.TritonDecider.table`.
    """
    num_rows, num_ids = values.shape
    device = values.device
    scratch = torch.zeros((num_rows, LANES + 3), dtype=torch.int64, device=device)
    listed = torch.empty((num_rows, MAX_LISTED), dtype=torch.int64, device=device)
    limits = torch.empty(num_rows, dtype=torch.int64, device=device)
    grid = (num_rows, -(-num_ids // (LANES * SLICES)))
    sizes = (values.stride(0), num_ids, num_rows)
    options = {"LANES": LANES, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    with torch.cuda.device_of(values):  # triton launches on the current device
        raise_lanes[grid](values, table, scratch, *sizes, SLICES=SLICES, **options)
        list_tokens[grid](values, table, scratch, listed, *sizes, SLICES=SLICES, ROOM=MAX_LISTED, **options)
        filter_limits[(num_rows,)](
            values, table, scratch, listed, limits, *sizes,
            ROOM=MAX_LISTED, CHUNK=CHUNK, ID_BITS=max(1, (num_ids - 1).bit_length()), **options,
        )  # fmt: skip
    return limits
