"""The race: argmax(logits - log a), looking only into blocks that can win."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.sampler.arrivals import BLOCK_SIZE, GROUP_SIZE, BlockArrivals, RaceKey, waits_behind_winner
from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.filters import NO_LIMIT, Limit
from outrider.engine.sampler.logit_blocks import LogitBlocks

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_GROUPS_PER_BLOCK = BLOCK_SIZE // GROUP_SIZE
_OFFSETS = np.arange(GROUP_SIZE, dtype=np.int64)


def run_race(
    blocks: LogitBlocks, arrivals: BlockArrivals, keys: Sequence[RaceKey], limits: Sequence[Limit] | None = None
) -> list[int]:
    """The winner of each row: argmax_v (value_v - log a_v), the lowest id among equals.

    Exactly what evaluating every token gives. The blocks' winners, whose arrivals are
    known, set a score to beat; by the bound max(values) - log e_b only blocks that can
    still beat it are looked into, and in those only groups of four tokens that can. That
    is 18 to 29 of 768 blocks on a flat distribution; on a peaked one about 64 tokens plus
    the few that hold the mass.

    Args:
        blocks: the values of the rows.
        arrivals: the block arrivals of the rows.
        keys: the decision of each row.
        limits: for each row the last token that takes part; None: all do.

    Returns:
        One token id for each row: the first NaN's where there is one.
    """
    if limits is not None and all(limit == NO_LIMIT for limit in limits):
        limits = None
    rows, groups, block_indices = _groups_that_can_win(blocks, arrivals, limits)
    values, can_win = groups
    pair_indices, group_offsets = np.nonzero(can_win)
    rows, block_indices = rows[pair_indices], block_indices[pair_indices]
    values = values[pair_indices, group_offsets]  # [num_groups, 4]
    group_ids = block_indices * _GROUPS_PER_BLOCK + group_offsets
    token_ids = group_ids[:, None] * GROUP_SIZE + _OFFSETS

    first = arrivals.first[rows, block_indices][:, None]
    winners = block_indices * BLOCK_SIZE + arrivals.winner_offsets[rows, block_indices]
    times = first + waits_behind_winner(keys, rows, group_ids)
    times = np.where(token_ids == winners[:, None], first, times)
    scores = values - logarithm(times)
    if limits is not None:
        scores[~_takes_part(values, token_ids, rows[:, None], limits)] = -np.inf
    return _best_of_each_row(blocks, rows, token_ids, scores)


def _groups_that_can_win(
    blocks: LogitBlocks, arrivals: BlockArrivals, limits: Sequence[Limit] | None
) -> tuple[Ints, tuple[Floats, Bools], Ints]:
    """Blocks that can win, n of them by rising row and block, and what is in them.

    Returns rows [n], (values [n, 16, 4], whether a group can win [n, 16]), block indices [n].
    """
    winner_ids = np.arange(blocks.num_blocks, dtype=np.int64) * BLOCK_SIZE + arrivals.winner_offsets
    winner_values = blocks.tokens(winner_ids)
    winner_scores = winner_values - arrivals.log_first
    lowest = None
    if limits is not None:
        each_row = np.arange(blocks.num_rows, dtype=np.int64)[:, None]
        winner_scores[~_takes_part(winner_values, winner_ids, each_row, limits)] = -np.inf
        lowest = np.asarray([limit.value for limit in limits], dtype=np.float32)[:, None]
    to_beat = _with_slack(winner_scores.max(axis=1))[:, None]
    block_can_win = blocks.maxima - arrivals.log_first >= to_beat
    if lowest is not None:
        block_can_win &= blocks.maxima >= lowest
    rows, block_indices = np.nonzero(block_can_win)

    values = blocks.blocks(rows, block_indices).reshape(len(rows), _GROUPS_PER_BLOCK, GROUP_SIZE)
    # Slices, not an axis of 4: numpy's reductions cost per output element.
    largest = np.maximum(
        np.maximum(values[..., 0], values[..., 1]), np.maximum(values[..., 2], values[..., 3])
    )  # [n, 16]
    log_first = arrivals.log_first[rows, block_indices][:, None]
    can_win = largest - log_first >= to_beat[rows]
    if lowest is not None:
        can_win &= largest >= lowest[rows]
    return rows, (values, can_win), block_indices


def _with_slack(scores: Floats) -> Floats:
    """A little less than each score: float32 logarithms need not be monotone to the last bit."""
    return scores - (np.float32(1e-5) + np.float32(1e-6) * np.minimum(np.abs(scores), np.float32(1e30)))


def _takes_part(values: Floats, token_ids: Ints, rows: Ints, limits: Sequence[Limit]) -> Bools:
    lowest = np.asarray([limit.value for limit in limits], dtype=np.float32)[rows]
    last_ids = np.asarray([limit.last_id for limit in limits], dtype=np.int64)[rows]
    return (values > lowest) | ((values == lowest) & (token_ids <= last_ids))


def _best_of_each_row(blocks: LogitBlocks, rows: Ints, token_ids: Ints, scores: Floats) -> list[int]:
    """Groups come by rising row and id, so the first of equal scores has the lowest id."""
    edges = np.searchsorted(rows, np.arange(blocks.num_rows + 1)).tolist()
    has_nan = np.isnan(blocks.maxima.max(axis=1)).tolist()
    chosen = []
    for row in range(blocks.num_rows):
        start, end = edges[row], edges[row + 1]
        if has_nan[row] or start == end:
            chosen.append(int(np.argmax(blocks.whole_row(row))))
            continue
        best = int(scores[start:end].argmax())
        chosen.append(int(token_ids[start:end].flat[best]))
    return chosen
