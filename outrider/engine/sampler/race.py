"""The race: argmax(values - log a), looking only into blocks that can win."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.sampler.arrivals import (
    BLOCK_SIZE,
    BlockArrivals,
    RaceKeys,
    block_arrivals,
    waits_behind_winner,
)
from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.logit_blocks import LogitBlocks, highest_blocks
from outrider.engine.sampler.order import order_keys


@dataclass(frozen=True, slots=True)
class CandidateRace:
    """How the winners of some decisions are found, with what their keys alone decide."""

    keys: RaceKeys
    arrivals: BlockArrivals

    @classmethod
    def of(cls, keys: RaceKeys, num_blocks: int) -> CandidateRace:
        return cls(keys, block_arrivals(keys, num_blocks))

    def run(self, blocks: LogitBlocks, *, num_candidates: int, limits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Winners [num_rows] int64 and whether each is open [num_rows] bool. Arguments and results as of `run_race`."""
        return run_race(blocks, self.keys, self.arrivals, num_candidates=num_candidates, limits=limits)

    def select(self, rows: Tensor) -> CandidateRace:
        """Some of the decisions: rows [n] int64."""
        return CandidateRace(self.keys.select(rows), self.arrivals.select(rows))


def run_race(
    blocks: LogitBlocks, keys: RaceKeys, arrivals: BlockArrivals, *, num_candidates: int, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The winner of each row: argmax_v (value_v - log a_v), the lowest id among equals.

    No score of a block is above max(values) - log e_b. Only the blocks of the highest bounds
    are looked into; a row is decided if its best score is above the bounds of all others.

    Args:
        blocks: the values of the rows.
        keys: of the rows.
        arrivals: the block arrivals of the rows.
        num_candidates: blocks to look into. If it is all of them, every row is decided.
        limits: [num_rows, 1] int64, the order key of the last token that takes part; None: all do.

    Returns:
        Winners [num_rows] int64: the first NaN where there is one, 0 where nothing is above -inf. And
        [num_rows] bool: whether the row is open, as another block may hold its winner.
    """
    bounds = blocks.maxima - arrivals.log_first
    if limits is not None:
        bounds = bounds.masked_fill(blocks.largest_keys() < limits, -torch.inf)
    candidates, next_bound = highest_blocks(bounds, num_candidates, nothing=-torch.inf)
    values, token_ids = blocks.look_into(candidates)  # [num_rows, n * 64]
    if limits is not None:
        values = values.masked_fill((order_keys(values, token_ids) < limits) & values.isnan().logical_not(), -torch.inf)

    first = arrivals.first.gather(1, candidates).unsqueeze(2)
    winner_ids = candidates * BLOCK_SIZE + arrivals.winner_offsets.gather(1, candidates)
    times = first + waits_behind_winner(keys, candidates)  # [num_rows, n, 64]
    times = torch.where(token_ids.view_as(times) == winner_ids.unsqueeze(2), first, times)
    scores = values - logarithm(times).flatten(1)

    best = scores.amax(dim=1, keepdim=True)
    is_best = (scores == best) | scores.isnan()
    winners = torch.where(is_best, token_ids, blocks.num_blocks * BLOCK_SIZE).amin(dim=1, keepdim=True)
    winners = torch.where(best == -torch.inf, 0, winners)
    is_open = torch.zeros_like(winners, dtype=torch.bool)
    if num_candidates < blocks.num_blocks:
        is_open = (next_bound >= _with_slack(best)) | blocks.maxima.isnan().any(dim=1, keepdim=True)
    return winners.squeeze(1), is_open.squeeze(1)


def _with_slack(scores: Tensor) -> Tensor:
    """A little less than each score: float32 logarithms need not be monotone to the last bit."""
    return scores - (scores.abs().clamp(max=1e30) * 1e-6 + 1e-5)
