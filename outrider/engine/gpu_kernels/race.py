"""The exponential race that draws tokens (Gumbel-max; see `outrider.engine.sampler.arrivals`), in two launches.

The first applies temperatures and computes arrival times and scores, the second picks the best score of each row. They
use the same float32 operations in the same order as `arrivals` and `elementary` of the sampler, each rounded
separately, so the winners are identical. The scores of greedy rows are their values, without arrival times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.gpu_kernels.elementary import logarithm, order_keys, order_of
from outrider.engine.sampler import arrivals

_BLOCK = tl.constexpr(arrivals.BLOCK_SIZE)
_GROUPS = tl.constexpr(arrivals.GROUPS_PER_BLOCK)
_PER_BLOCK = tl.constexpr(1.0 / arrivals.BLOCK_SIZE)
_WORD_SCALE = tl.constexpr(2.0**-32)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)

BLOCKS_PER_PROGRAM = 16
_MINUS_INF = tl.constexpr(-2139095041)  # the high half of the order key of -inf
_NAN = tl.constexpr(0x7FFFFFFF)  # above the high half of the order key of any number


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Returns the four words of Philox4x32-10 for uint32 counters c0 … c3 and keys k0 and k1, broadcast together."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _exponential(words):
    """Returns the Exp(1) variable of each word, as arrivals.exponential does."""
    uniform = (words.to(tl.float32) + 0.5) * _WORD_SCALE
    uniform = tl.minimum(uniform, _LARGEST_UNIFORM)
    rounded = 1.0 - uniform
    return -logarithm(rounded, (1.0 - rounded) - uniform)


@triton.jit
def _arrivals(blocks, position, sample, low, high, BLOCKS: tl.constexpr):
    """Returns the arrival times of the tokens of some blocks: [BLOCKS, 64] float32."""
    zero = tl.zeros([BLOCKS], tl.uint32)
    first_word, second_word, _, _ = _philox(
        blocks.to(tl.uint32), zero + position, zero + sample, zero, zero + low, zero + high
    )
    first = _exponential(first_word) * _PER_BLOCK
    winners = (second_word & (_BLOCK - 1)).to(tl.int32)

    groups = blocks[:, None] * _GROUPS + tl.arange(0, _GROUPS)[None, :]
    zeros = tl.zeros([BLOCKS, _GROUPS], tl.uint32)
    w0, w1, w2, w3 = _philox(
        groups.to(tl.uint32), zeros + position, zeros + sample, zeros + 1, zeros + low, zeros + high
    )
    # Word v mod 4 belongs to token v, because a join adds the dimension that varies fastest.
    tokens = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS, _BLOCK])
    offsets = tl.arange(0, _BLOCK)
    times = first[:, None] + _exponential(tokens)
    return tl.where(offsets[None, :] == winners[:, None], first[:, None], times)


@triton.jit(do_not_specialize=["num_rows"])
def best_scores(
    values,  # [num_rows, num_ids] float32 after step 4 of SamplingParams, rows `row_stride` apart
    table,  # [8, num_rows] int64, see `TritonDecider.table`
    limits,  # [num_rows] int64: the order key of the last token that competes; used if HAS_LIMITS
    best,  # [num_rows, num_chunks] int64: the order key of each chunk's best score
    row_stride,
    num_ids,
    num_rows,
    num_chunks,
    BLOCKS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):
    """Computes scores and stores the order key of each chunk's best one. Grid: rows, chunks of BLOCKS blocks."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    position = tl.load(table + row).to(tl.uint32)
    sample = tl.load(table + num_rows + row).to(tl.uint32)
    low = tl.load(table + 2 * num_rows + row).to(tl.uint32)
    high = tl.load(table + 3 * num_rows + row).to(tl.uint32)
    temperature = tl.load(table + 4 * num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)

    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    own = tl.load(values + row.to(tl.int64) * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
    is_nan = own != own  # noqa: PLR0124
    if temperature > 0.0:
        own = tl.div_rn(own, temperature)
        if HAS_LIMITS:
            is_out = order_keys(order_of(own), ids) < tl.load(limits + row)
            own = tl.where(is_out & ~is_nan, float("-inf"), own)
        times = _arrivals(blocks, position, sample, low, high, BLOCKS)
        own = own - logarithm(times, tl.zeros_like(times))
    keys = order_keys(tl.where(is_nan, _NAN, order_of(own)), ids)
    tl.store(best + row * num_chunks + chunk, tl.max(tl.max(keys, axis=1), axis=0))


@triton.jit
def pick(
    best,  # [num_rows, num_chunks] int64
    token_ids,  # [num_rows] int64
    num_chunks,
    CHUNKS: tl.constexpr,  # num_chunks rounded up to a power of two
):
    """Picks the token of each row's best key; 0 if nothing is above -inf. Grid: rows."""
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    keys = tl.load(best + row * num_chunks + chunks, mask=chunks < num_chunks, other=-0x8000000000000000)
    key = tl.max(keys, axis=0)
    token_id = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    tl.store(token_ids + row, tl.where((key >> 32) <= _MINUS_INF, 0, token_id))


def race_winners(values: Tensor, table: Tensor, limits: Tensor | None, token_ids: Tensor | None = None) -> Tensor:
    """Returns the token of each row: argmax_v (value_v / temperature - log a_v), or argmax_v value_v for a greedy row.

    a_v is the arrival time of token v.

    Args:
        values: [num_rows, num_ids] float32 after step 4 of SamplingParams, each row contiguous.
        table: [8, num_rows] int64, see `outrider.engine.sampler.triton_decider.TritonDecider.table`.
        limits: [num_rows] int64, the order key of the last token that competes; None: all compete.
        token_ids: [num_rows] int64, written and returned; None: a new tensor.

    Returns:
        [num_rows] int64: the lowest id among equals, the first NaN if there is one, 0 if nothing is above -inf.
    """
    num_rows, num_ids = values.shape
    num_chunks = -(-num_ids // (arrivals.BLOCK_SIZE * BLOCKS_PER_PROGRAM))
    best = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=values.device)
    if token_ids is None:
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    with torch.cuda.device_of(values):  # triton launches on the current device
        best_scores[num_rows, num_chunks](
            values, table, table if limits is None else limits, best,
            values.stride(0), num_ids, num_rows, num_chunks,
            BLOCKS=BLOCKS_PER_PROGRAM, HAS_LIMITS=limits is not None, enable_fp_fusion=False,
        )  # fmt: skip
        pick[(num_rows,)](
            best, token_ids, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks), enable_fp_fusion=False
        )
    return token_ids
