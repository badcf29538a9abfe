"""min_p, top_k and top_p of whole rows in five launches, which find the order key of the last token that is kept.

The filters keep a prefix of the tokens' order (see `outrider.engine.sampler.filters`), usually some hundreds of tokens.
So the first step is to find a value that a few thousand tokens reach: ids are divided into LANES classes, and the value
is the smallest of the classes' maxima. The tokens that reach it are listed.

A row that keeps more tokens needs another list, of only the tokens among which its last token is. The tokens' distances
from the largest value are divided into BINS bins, and the weights of the bins are added up. The bin in which the total
weight reaches what the filter keeps is listed. The two launches that do this have nothing to do for other rows.

The last kept token is found without sorting, three bits of its key at a time. Each time the whole list is read, or the
whole row if the list is too short, as it is if very many tokens have the same value.

A token's weight is 1 if the row has a top_k, otherwise its mass. Weights are integers, so sums do not depend on the
order of the row or of the list.

For each row, programs write to a scratch row of int64, initially 0: the largest order of each class, the weights of the
bins, and the words whose places are named below.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.gpu_kernels.elementary import MIN_LOG_WEIGHT, masses_of, order_keys, order_of, value_of

CHUNK = 1024
"""Number of tokens that a program searches at a time."""
LANES = 512
"""Number of classes of ids. With independent logits, about LANES * log(LANES) tokens are listed."""
SLICES = 4
"""Number of ids of each class that one program reads."""
BINS = 2048
"""Number of bins of distances. With normal logits, a bin has at most about 0.2% of the tokens."""
MAX_LISTED = 8192
"""Maximum number of keys in a row's list."""
NUM_WARPS = 8
_LOWEST_KEY = tl.constexpr(-0x8000000000000000)
_LOWEST_ORDER = tl.constexpr(-0x80000000)
_HIGHEST_ORDER = tl.constexpr(0x7FFFFFFF)
_MINUS_INF = tl.constexpr(-2139095041)  # the order of -inf
_NAN = tl.constexpr(0x7FFFFFFF)  # above the order of every number
_FARTHEST = tl.constexpr(-MIN_LOG_WEIGHT.value)  # the distance at which masses end
_SHORTEST = tl.constexpr(2.0**-100)  # instead of 0, by which nothing can be divided

# The words of a scratch row, after which the maxima of the classes and the weights of the bins follow.
_NUM_LISTED = tl.constexpr(0)
_LISTED = tl.constexpr(1)  # weight of the listed tokens
_TOTAL = tl.constexpr(2)  # weight of the tokens that min_p keeps
_DEPTH = tl.constexpr(3)  # highest int32 minus the lowest order of these tokens
_NUM_RELISTED = tl.constexpr(4)  # number of tokens in the second list
_WORDS = tl.constexpr(8)  # more than there are, so that what follows is aligned


@triton.jit
def _settings(table, row, num_rows):
    """Returns one row's temperature, log of min_p, top_k and top_p."""
    temperature = tl.load(table + 4 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    log_min_p = tl.load(table + 5 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.load(table + 6 * num_rows + row)
    top_p = tl.load(table + 7 * num_rows + row).to(tl.float64, bitcast=True)
    return temperature, log_min_p, top_k, top_p


@triton.jit
def _bounds(scratch, log_min_p, LANES: tl.constexpr):
    """Returns the orders of the smallest and the largest class maximum, and the lowest key that min_p keeps."""
    maxima = tl.load(scratch + _WORDS + tl.arange(0, LANES)) + _LOWEST_ORDER
    least, largest = tl.min(maxima, axis=0).to(tl.int32), tl.max(maxima, axis=0).to(tl.int32)
    limit = tl.full([], _LOWEST_KEY, tl.int64)
    if log_min_p > float("-inf"):
        limit = order_of(value_of(largest) + log_min_p).to(tl.int64) << 32
    return least, largest, limit


@triton.jit
def _share(top_p, total):
    """Returns the mass that top_p keeps; at least 1, so that the first token is kept. Uses float64, as on a CPU."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _wanted(scratch, top_k, top_p):
    """Returns the weight that top_k keeps, or top_p without top_k."""
    total = tl.load(scratch + _TOTAL)
    return tl.where(top_k > 0, tl.minimum(top_k, total), _share(top_p, total))


@triton.jit
def _is_decided(scratch, wanted, top_k, top_p, ROOM: tl.constexpr):
    """Returns whether the first list, or having neither top_k nor top_p, is enough to find the last kept token."""
    is_enough = (tl.load(scratch + _NUM_LISTED) <= ROOM) & (tl.load(scratch + _LISTED) >= wanted)
    return is_enough | ((top_k == 0) & (top_p >= 1.0))


@triton.jit
def _weights(own, largest, top_k):
    """Returns the weights of tokens: int64."""
    weights = tl.full(own.shape, 1, tl.int64)
    if top_k == 0:
        weights = masses_of(own, largest)
    return weights


@triton.jit
def _kept(values, temperature, limit, num_ids, SIZE: tl.constexpr):
    """Returns the values and keys of one chunk of a row, and which of these tokens min_p keeps."""
    ids = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    own = tl.load(values + ids, mask=ids < num_ids, other=float("-inf"))
    own = tl.div_rn(own, temperature)
    order = order_of(own)
    keys = order_keys(order, ids)
    return own, keys, (order > _MINUS_INF) & (keys >= limit)


@triton.jit
def _list(listed, count, keys, is_listed, ROOM: tl.constexpr):
    """Adds keys to a list of `count` keys."""
    number = tl.sum(is_listed.to(tl.int32), axis=0)
    if number > 0:
        first = tl.atomic_add(count, number.to(tl.int64), sem="relaxed")
        places = first + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(listed + places, keys, mask=is_listed & (places < ROOM))


@triton.jit(do_not_specialize=["num_rows"])
def raise_lanes(
    values,  # [num_rows, num_ids] float32 after step 4 of SamplingParams, rows `row_stride` apart
    table,  # [8, num_rows] int64, see `TritonDecider.table`
    scratch,  # [num_rows, _WORDS + LANES + BINS] int64
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
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
        tl.atomic_max(scratch + row * (_WORDS + LANES + BINS) + _WORDS + lanes, maxima, sem="relaxed")


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
    BINS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Lists tokens that reach the smallest class maximum, and adds up weights of tokens.

    Grid: rows, chunks of SLICES * LANES ids.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    if (temperature == 0.0) | ((top_k == 0) & (top_p >= 1.0)):
        return
    scratch += row * (_WORDS + LANES + BINS)
    least, largest, limit = _bounds(scratch, log_min_p, LANES)
    own, keys, is_kept = _kept(values + row * row_stride, temperature, limit, num_ids, SLICES * LANES)
    order = order_of(own)
    is_listed = is_kept & (order >= least)
    _list(listed + row * ROOM, scratch + _NUM_LISTED, keys, is_listed, ROOM)
    weights = tl.where(is_kept, _weights(own, value_of(largest), top_k), 0)
    tl.atomic_add(scratch + _LISTED, tl.sum(tl.where(is_listed, weights, 0), axis=0), sem="relaxed")
    tl.atomic_add(scratch + _TOTAL, tl.sum(weights, axis=0), sem="relaxed")
    lowest = tl.min(tl.where(is_kept, order, _HIGHEST_ORDER), axis=0)
    tl.atomic_max(scratch + _DEPTH, -lowest.to(tl.int64) + _HIGHEST_ORDER, sem="relaxed")


@triton.jit
def _bins_of(own, scratch, largest, BINS: tl.constexpr):
    """Returns the bins of values. They increase with the distance from the largest value; bin 0 has that value.

    The bins divide the distances of the tokens that min_p keeps, up to that at which masses end.
    """
    span = value_of(largest) - value_of((-tl.load(scratch + _DEPTH) + _HIGHEST_ORDER).to(tl.int32))
    span = tl.where(span < _FARTHEST, span, _FARTHEST)  # infinite and NaN, too
    scale = tl.div_rn(tl.full([], BINS, tl.float32), tl.maximum(span, _SHORTEST))
    distances = tl.where(own == value_of(largest), 0.0, value_of(largest) - own)
    return tl.minimum(distances * scale, BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows"])
def fill_bins(
    values,  # see raise_lanes
    table,
    scratch,
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Adds up the weights of the bins of rows whose list is not enough. Grid: rows, chunks of SLICES * LANES ids."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    scratch += row * (_WORDS + LANES + BINS)
    if (temperature == 0.0) | _is_decided(scratch, _wanted(scratch, top_k, top_p), top_k, top_p, ROOM):
        return
    _least, largest, limit = _bounds(scratch, log_min_p, LANES)
    own, _keys, is_kept = _kept(values + row * row_stride, temperature, limit, num_ids, SLICES * LANES)
    weights = _weights(own, value_of(largest), top_k)
    bins = _bins_of(own, scratch, largest, BINS)
    is_kept &= (weights > 0) & (largest != _NAN)
    tl.atomic_add(scratch + _WORDS + LANES + bins, weights, mask=is_kept, sem="relaxed")


@triton.jit
def _listed_bins(scratch, wanted, top_k, top_p, LANES: tl.constexpr, BINS: tl.constexpr):
    """Returns the first and the last bin of the second list, and the weight before them."""
    bins = tl.arange(0, BINS)
    weights = tl.load(scratch + _WORDS + LANES + bins)
    last = tl.minimum(tl.sum((tl.cumsum(weights, axis=0) < wanted).to(tl.int32), axis=0), BINS - 1)
    first = tl.where((top_k > 0) & (top_p < 1.0), 0, last)  # top_p refers to the masses of all that top_k keeps
    return first, last, tl.sum(tl.where(bins < first, weights, 0), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def list_bins(
    values,  # see raise_lanes
    table,
    scratch,
    listed,  # see list_tokens
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    BINS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Makes the second lists, of rows whose first list is not enough. Grid: rows, chunks of SLICES * LANES ids."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    scratch += row * (_WORDS + LANES + BINS)
    wanted = _wanted(scratch, top_k, top_p)
    if (temperature == 0.0) | _is_decided(scratch, wanted, top_k, top_p, ROOM):
        return
    _least, largest, limit = _bounds(scratch, log_min_p, LANES)
    first, last, _before = _listed_bins(scratch, wanted, top_k, top_p, LANES, BINS)
    own, keys, is_kept = _kept(values + row * row_stride, temperature, limit, num_ids, SLICES * LANES)
    bins = _bins_of(own, scratch, largest, BINS)
    is_listed = is_kept & (bins >= first) & (bins <= last) & (largest != _NAN)
    _list(listed + row * ROOM, scratch + _NUM_RELISTED, keys, is_listed, ROOM)


@triton.jit
def _last_kept(
    values, listed, end, is_listed, before, temperature, lowest, highest, limit, wanted, top_p,
    CHUNK: tl.constexpr, ID_BITS: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """Returns the key of the token at which the total weight of the tokens, largest key first, reaches `wanted`.

    Only tokens with keys of at least `limit` are counted; if their total is below `wanted`, the result is `limit`.

    `end`, `is_listed`: the number of keys to read, and whether they are in the list or are those of the row.
    `before`: the weight of the tokens that come before those of the list.
    `lowest`: an order that no token read is below.
    `wanted`: -1 for the fraction top_p of the total mass of the counted tokens.
    """
    lowest = tl.maximum(lowest, (limit >> 32).to(tl.int32)).to(tl.int64)
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
        totals = before + tl.sum(sums, axis=0)  # descending; the first is the weight of all tokens within the limit
        if IS_MASS:
            wanted = tl.where(wanted < 0, _share(top_p, tl.max(totals, axis=0)), wanted)
        found += tl.maximum(tl.sum((totals >= wanted).to(tl.int64), axis=0) - 1, 0) << shift
        shift -= 3
    return tl.maximum(limit, ((found >> ID_BITS) << 32) | (0xFFFFFFFF - low_half) | (found & low_half))


@triton.jit(do_not_specialize=["num_rows"])
def filter_limits(
    values,  # see raise_lanes
    table,
    scratch,
    listed,  # see list_tokens
    limits,  # [num_rows] int64
    row_stride,
    num_ids,
    num_rows,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    ID_BITS: tl.constexpr,  # number of bits of the largest id
):
    """Finds limits. Grid: rows. A row keeps all tokens if it has no filters, a NaN (left to the race), or only -inf."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p, top_k, top_p = _settings(table, row, num_rows)
    scratch += row * (_WORDS + LANES + BINS)
    least, highest, limit = _bounds(scratch, log_min_p, LANES)
    if (temperature == 0.0) | (highest == _NAN) | (highest <= _MINUS_INF):
        tl.store(limits + row, tl.full([], _LOWEST_KEY, tl.int64))
        return

    values += row * row_stride
    listed += row * ROOM
    wanted = _wanted(scratch, top_k, top_p)
    is_listed = _is_decided(scratch, wanted, top_k, top_p, ROOM)
    end = tl.load(scratch + _NUM_LISTED)
    before = tl.full([], 0, tl.int64)
    lowest = least
    if not is_listed:
        end = tl.load(scratch + _NUM_RELISTED)
        lowest = tl.full([], _LOWEST_ORDER, tl.int32)
        is_listed = end <= ROOM
        if is_listed:
            _first, _last, before = _listed_bins(scratch, wanted, top_k, top_p, LANES, BINS)
    end = tl.where(is_listed, end, num_ids).to(tl.int32)
    if top_k > 0:
        limit = _last_kept(
            values, listed, end, is_listed, before, temperature, lowest, highest, limit, wanted, top_p,
            CHUNK, ID_BITS, IS_MASS=False,
        )  # fmt: skip
        wanted = tl.full([], -1, tl.int64)  # top_p refers to the mass that top_k keeps
    if top_p < 1.0:
        limit = _last_kept(
            values, listed, end, is_listed, before, temperature, lowest, highest, limit, wanted, top_p,
            CHUNK, ID_BITS, IS_MASS=True,
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
    scratch = torch.zeros((num_rows, int(_WORDS) + LANES + BINS), dtype=torch.int64, device=device)
    listed = torch.empty((num_rows, MAX_LISTED), dtype=torch.int64, device=device)
    limits = torch.empty(num_rows, dtype=torch.int64, device=device)
    grid = (num_rows, -(-num_ids // (LANES * SLICES)))
    sizes = (values.stride(0), num_ids, num_rows)
    options = {"LANES": LANES, "BINS": BINS, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    with torch.cuda.device_of(values):  # triton launches on the current device
        raise_lanes[grid](values, table, scratch, *sizes, SLICES=SLICES, **options)
        options["ROOM"] = MAX_LISTED
        list_tokens[grid](values, table, scratch, listed, *sizes, SLICES=SLICES, **options)
        fill_bins[grid](values, table, scratch, *sizes, SLICES=SLICES, **options)
        list_bins[grid](values, table, scratch, listed, *sizes, SLICES=SLICES, **options)
        filter_limits[(num_rows,)](
            values, table, scratch, listed, limits, *sizes,
            CHUNK=CHUNK, ID_BITS=max(1, (num_ids - 1).bit_length()), **options,
        )  # fmt: skip
    return limits
