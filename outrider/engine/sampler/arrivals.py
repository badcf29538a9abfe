"""Arrival times: the race that decides the token at a position, determined by (seed, sample, position).

Token v has an arrival time a(v), an independent Exp(1) variable, and the position's token is argmax(logits - log a), an
exact draw from softmax(logits) (the Gumbel-max trick). The vocabulary is divided into blocks of 64 ids. The time of a
block's first arrival and its winner, the token that arrives then, are drawn first. The other tokens' times are drawn as
delays after it, which is exact because Exp(1) is memoryless. So blocks that cannot win are skipped. For block b and
token v, Philox draws words from the counter (c0, position, sample, purpose):

    purpose 0, c0 = b:        words w0, w1 -> e_b = E(w0) / 64, winner i_b = 64 b + (w1 & 63)
    purpose 1, c0 = v div 4:  word v mod 4 -> E_v;  a(i_b) = e_b, else a(v) = e_b + E_v
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from outrider.engine.arrays import Array, namespace, to_array_like
from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.philox import WORD, philox4x32, split_seed

BLOCK_SIZE = 64  # token ids in a block
GROUP_SIZE = 4  # token ids that share one counter of purpose 1
GROUPS_PER_BLOCK = BLOCK_SIZE // GROUP_SIZE

_BLOCK_PURPOSE = 0
_TOKEN_PURPOSE = 1
_WORD_SCALE = 2.0**-32
_LARGEST_UNIFORM = 1.0 - 2.0**-24
_PER_BLOCK = 1.0 / BLOCK_SIZE


class RaceKey(NamedTuple):
    """The key that fully determines the arrivals of one decision."""

    seed: int  # uint64
    sample: int
    position: int  # absolute

    def words(self, purpose: int) -> tuple[int, int, int, int]:
        """Returns the decision's four random words for a purpose. Purposes 0 and 1 are reserved for the race."""
        return philox4x32((0, self.position & WORD, self.sample, purpose), split_seed(self.seed))


def words_of(keys: Iterable[RaceKey], logits: Array) -> Array:
    """Returns position, sample, and the seed's low and high word of each key: [4, num_rows] int64 on logits.device."""
    rows = [(key.position & WORD, key.sample, *split_seed(key.seed)) for key in keys]
    return to_array_like(np.asarray(rows, dtype=np.int64).T, logits)


def draw(keys: Array, counters: Array, purpose: int) -> tuple[Array, Array, Array, Array]:
    """Returns four random words for each counter and row. `keys`: as from `words_of`.

    `counters`: [num_rows or 1, n] int64, broadcast to all rows.
    """
    position, sample, low, high = keys[:, :, None]  # each [num_rows, 1]
    return philox4x32((counters, position, sample, purpose), (low, high))


def exponential(words: Array) -> Array:
    """Returns E(w), the Exp(1) variable of each word (int64): float32, same shape.

    Small values, which win races, keep full relative precision. The uniform number u is capped below 1, since otherwise
    128 of the 2^32 words would give infinity.
    """
    xp = namespace(words)
    uniform = xp.astype(words, xp.float32)
    uniform += 0.5
    uniform *= _WORD_SCALE
    uniform = xp.clip(uniform, max=_LARGEST_UNIFORM)
    rounded = 1.0 - uniform
    return -logarithm(rounded, (1.0 - rounded) - uniform)  # -log1p(-u)


def arrivals_of(keys: Array, num_ids: int) -> Array:
    """Returns a(v) of every token for some decisions: [num_rows, num_ids] float32. `keys`: as from `words_of`."""
    xp, device = namespace(keys), keys.device
    num_blocks = -(-num_ids // BLOCK_SIZE)
    first_words, winner_words, _, _ = draw(keys, xp.arange(num_blocks, device=device)[None], _BLOCK_PURPOSE)
    first = (exponential(first_words) * _PER_BLOCK)[:, :, None]  # [num_rows, num_blocks, 1]: e_b
    winners = (winner_words & (BLOCK_SIZE - 1))[:, :, None]
    groups = xp.arange(num_blocks * GROUPS_PER_BLOCK, device=device)[None]
    words = xp.stack(draw(keys, groups, _TOKEN_PURPOSE), axis=2)  # [num_rows, num_groups, 4]
    times = first + xp.reshape(exponential(words), (-1, num_blocks, BLOCK_SIZE))
    times = xp.where(xp.arange(BLOCK_SIZE, device=device) == winners, first, times)
    return xp.reshape(times, (-1, num_blocks * BLOCK_SIZE))[:, :num_ids]
