"""Arrival times: the race that decides a position, fixed in advance by (seed, sample, position).

Token v has an arrival a(v), an independent Exp(1) variable, and the token of the position is
argmax(logits - log a), an exact draw from softmax(logits) (the Gumbel-max trick). The
vocabulary is cut in blocks of 64 ids. A block's first arrival and its winner are drawn
first, the others wait behind the winner (memorylessness), so that a block that cannot win
is never looked into:

    purpose 0, c0 = b:        words w0, w1 -> e_b = E(w0) / 64, winner i_b = 64 b + (w1 & 63)
    purpose 1, c0 = v div 4:  word v mod 4 -> E_v;  a(i_b) = e_b, else a(v) = e_b + E_v

Arrivals do not depend on logits: those of the blocks are computed for a window of
positions at once and kept, as a position is decided again after a rejection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.philox import Words, philox4x32, split_seed

BLOCK_SIZE = 64  # token ids in a block
GROUP_SIZE = 4  # token ids that share one counter of purpose 1

_BLOCK_PURPOSE = 0
_TOKEN_PURPOSE = 1
_WINDOW = 8  # positions whose block arrivals are computed together
_WORD_SCALE = np.float32(2.0**-32)
_ONE, _HALF_STEP = np.float32(1.0), np.float32(0.5)
_LARGEST_UNIFORM = np.float32(1.0 - 2.0**-24)
_PER_BLOCK = np.float32(1.0 / BLOCK_SIZE)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class RaceKey(NamedTuple):
    """What alone decides the arrivals of one decision."""

    seed: int  # uint64
    sample: int
    position: int  # absolute


@dataclass(frozen=True, slots=True)
class BlockArrivals:
    """First arrivals of all blocks, for some decisions."""

    first: Floats  # [num_rows, num_blocks] float32: e_b
    log_first: Floats  # [num_rows, num_blocks] float32: log e_b
    winner_offsets: npt.NDArray[np.uint8]  # [num_rows, num_blocks] uint8: i_b - 64 b

    def select(self, rows: slice | Ints) -> BlockArrivals:
        """Some of the decisions."""
        return BlockArrivals(self.first[rows], self.log_first[rows], self.winner_offsets[rows])


def exponential(words: Words) -> Floats:
    """E(w): the Exp(1) variable of each word, float32, same shape.

    Small values, which win races, keep full relative precision. The largest argument
    is capped below 1: without the cap 128 of the 2^32 words would give infinity.
    """
    uniform = words.astype(np.float32)
    uniform += _HALF_STEP
    uniform *= _WORD_SCALE
    np.minimum(uniform, _LARGEST_UNIFORM, out=uniform)
    rounded = _ONE - uniform
    times = logarithm(rounded, (_ONE - rounded) - uniform)  # log1p(-u)
    return np.negative(times, out=times)


def block_arrivals(seed: int, sample: int, positions: Sequence[int], num_blocks: int) -> BlockArrivals:
    """Purpose 0 for each position and block."""
    blocks = np.arange(num_blocks, dtype=np.uint64)
    rows = np.asarray(positions, dtype=np.int64).astype(np.uint64)[:, None] & np.uint64(0xFFFFFFFF)
    w0, w1, _, _ = philox4x32((blocks, rows, sample, _BLOCK_PURPOSE), split_seed(seed))
    first = exponential(w0)
    first *= _PER_BLOCK
    return BlockArrivals(
        first=first, log_first=logarithm(first), winner_offsets=(w1 & np.uint64(BLOCK_SIZE - 1)).astype(np.uint8)
    )


def waits_behind_winner(keys: Sequence[RaceKey], rows: Ints, groups: Ints) -> Floats:
    """Purpose 1: E_v of the four tokens of each group.

    Args:
        keys: one for each row.
        rows: [num_groups] int64, index into `keys`.
        groups: [num_groups] int64, v div 4.

    Returns:
        [num_groups, 4] float32.
    """
    key_0, key_1 = np.asarray([split_seed(key.seed) for key in keys], dtype=np.uint64).T
    position = np.asarray([key.position for key in keys], dtype=np.uint64)
    sample = np.asarray([key.sample for key in keys], dtype=np.uint64)
    counter_0 = groups.astype(np.uint64)
    if len(keys) == 1:  # one row: its words broadcast, which saves passes over the groups
        words = philox4x32((counter_0, position, sample, _TOKEN_PURPOSE), (key_0, key_1))
    else:
        words = philox4x32((counter_0, position[rows], sample[rows], _TOKEN_PURPOSE), (key_0[rows], key_1[rows]))
    return exponential(np.stack(words, axis=-1))


class ArrivalCache:
    """Block arrivals by decision: computed a window of positions at a time, the least recently used dropped.

    Owned by one thread. Memory is bounded by `max_bytes`, apart from what one call needs.
    """

    def __init__(self, *, num_blocks: int, max_bytes: int) -> None:
        bytes_per_window = _WINDOW * num_blocks * (4 + 4 + 1)
        self._num_blocks = num_blocks
        self._max_windows = max(1, max_bytes // bytes_per_window)
        self._windows: OrderedDict[tuple[int, int, int], BlockArrivals] = OrderedDict()

    def __len__(self) -> int:
        """Windows held."""
        return len(self._windows)

    def rows(self, keys: Sequence[RaceKey]) -> BlockArrivals:
        """The block arrivals of these decisions, a row for each key."""
        found = [self._row(key) for key in keys]
        if len(found) == 1:
            return found[0]
        return BlockArrivals(
            first=np.concatenate([row.first for row in found]),
            log_first=np.concatenate([row.log_first for row in found]),
            winner_offsets=np.concatenate([row.winner_offsets for row in found]),
        )

    def _row(self, key: RaceKey) -> BlockArrivals:
        # Windows of different samples begin at different positions, so that samples which
        # started together do not all pay for a new window in the same step.
        shift = (key.seed + 3 * key.sample) % _WINDOW
        window, offset = divmod(key.position + shift, _WINDOW)
        name = (key.seed, key.sample, window)
        arrivals = self._windows.get(name)
        if arrivals is None:
            start = window * _WINDOW - shift
            arrivals = block_arrivals(key.seed, key.sample, range(start, start + _WINDOW), self._num_blocks)
            self._windows[name] = arrivals
            if len(self._windows) > self._max_windows:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(name)
        return arrivals.select(slice(offset, offset + 1))
