"""A round of decisions: rows of one step that are decided alike, after step 4 of the contract's SamplingParams.

`run` finds a token for each row without waiting for the device, and a verdict on each where only some blocks were
looked into: rows whose token does not stand go `again`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.sampler.arrivals import RaceKeys
from outrider.engine.sampler.filters import Filters, has_filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.order import order_keys
from outrider.engine.sampler.race import CandidateRace
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import upload, upload_ids
from outrider.request import SamplingParams

_USUAL_CANDIDATES = 64
"""Blocks that are looked into at first: more than most races need (benchmarks/LOG.md)."""

_RACE_OPEN, _FILTERS_OPEN, _FILTERED_OUT = 1, 2, 4
"""Verdicts on a winner, which add up: another block may hold it; whether top_p keeps it depends on other blocks; \
top_p leaves it out. 0: it stands."""


class Outcome(NamedTuple):
    """What a round has found."""

    token_ids: Tensor  # [num_rows] int64
    verdicts: Tensor | None = None  # [num_rows] int64; None: all stand


@dataclass(frozen=True, slots=True)
class Greedy:
    """Rows that take their largest value, in one round."""

    rows: Sequence[int]  # of the step
    values: Tensor  # [num_rows, num_ids] float32

    def run(self) -> tuple[Outcome, Greedy]:
        """Tokens, which stand."""
        return Outcome(first_of_largest(self.values)), self

    def again(self, verdicts: Sequence[int]) -> Greedy:
        """Never: all tokens stand."""
        raise AssertionError(f"verdicts {verdicts} on greedy rows")


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows that race: steps 5 to 7."""

    rows: Sequence[int]  # of the step
    params: Sequence[SamplingParams]
    blocks: LogitBlocks  # after step 5
    race: CandidateRace
    filters: Filters | None  # None: no row has any
    num_candidates: int  # blocks that are looked into
    is_whole: bool = False  # all blocks, and the limits are those of all filters: every token stands

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        decisions: Sequence[Decision],
        values: Tensor,
        *,
        is_whole: bool = False,
    ) -> Draw:
        """The first round.

        Args:
            rows: of the step, at least one.
            decisions: one for each.
            values: [num_rows, num_ids] float32, after step 4.
            is_whole: whether it is to be the only round, at the price of looking into all tokens.
        """
        device = values.device
        params = [decision.params for decision in decisions]
        keys = RaceKeys.of([decision.key for decision in decisions], device)
        blocks = LogitBlocks.of(divide_by_temperatures(values, params))
        num_candidates = blocks.num_blocks if is_whole else _USUAL_CANDIDATES
        filters = _filters_of(params, blocks, num_candidates)
        if is_whole and filters is not None:
            filters = replace(filters, limits=filters.limits_with_top_p(), top_p=None)
        return cls(
            rows=rows,
            params=params,
            blocks=blocks,
            race=CandidateRace.of(keys, blocks.num_blocks),
            filters=filters,
            num_candidates=num_candidates,
            is_whole=is_whole,
        )

    def run(self) -> tuple[Outcome, Draw]:
        """Winners and verdicts on them. And the draw with what top_p leaves out by now."""
        limits = None if self.filters is None else self.filters.limits
        winners, is_open = self.race.run(self.blocks, num_candidates=self.num_candidates, limits=limits)
        if self.is_whole:
            return Outcome(winners), self
        verdicts = is_open * _RACE_OPEN
        if self.filters is None:
            return Outcome(winners, verdicts), self
        winner_keys = order_keys(self.blocks.token_values(winners), winners).unsqueeze(1)
        is_out, is_open, filters = self.filters.check(winner_keys)
        verdicts += (is_open * _FILTERS_OPEN + is_out * _FILTERED_OUT).squeeze(1)
        return Outcome(winners, verdicts), replace(self, filters=filters)

    def again(self, verdicts: Sequence[int]) -> Draw:
        """The next round, of the rows whose winner does not stand: at least one."""
        chosen = [i for i, verdict in enumerate(verdicts) if verdict]
        indices = upload_ids(chosen, self.blocks.values.device)
        params, blocks = [self.params[i] for i in chosen], self.blocks.select(indices)
        filters = None if self.filters is None else self.filters.select(indices)
        if any(verdict & _FILTERS_OPEN for verdict in verdicts):
            filters = _filters_of(params, blocks, blocks.num_blocks)
        is_race_open = any(verdict & _RACE_OPEN for verdict in verdicts)
        return Draw(
            rows=[self.rows[i] for i in chosen],
            params=params,
            blocks=blocks,
            race=self.race.select(indices),
            filters=filters,
            num_candidates=blocks.num_blocks if is_race_open else self.num_candidates,
        )


def _filters_of(params: Sequence[SamplingParams], blocks: LogitBlocks, num_candidates: int) -> Filters | None:
    return Filters.of(params, blocks, num_candidates=num_candidates) if any(map(has_filters, params)) else None


def divide_by_temperatures(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Step 5 for rows that are not greedy: [num_rows, num_ids] float32."""
    if all(each.temperature == 1.0 for each in params):
        return values
    # Not by a number: a GPU would multiply by its reciprocal.
    return values / upload(np.asarray([[each.temperature] for each in params], dtype=np.float32), values.device)


def first_of_largest(values: Tensor) -> Tensor:
    """Argmax of each row with ties to the lowest id, which torch.argmax does not promise on every device.

    [num_rows, num_ids] -> [num_rows] int64; the first NaN where there is one.
    """
    blocks = LogitBlocks.of(values)
    block = _first_of_largest(blocks.maxima)
    in_block, token_ids = blocks.look_into(block)
    return token_ids.gather(1, _first_of_largest(in_block)).squeeze(1)


def _first_of_largest(values: Tensor) -> Tensor:
    """[num_rows, n] -> [num_rows, 1] int64."""
    is_largest = (values == values.amax(dim=1, keepdim=True)) | values.isnan()
    places = torch.arange(values.shape[1], device=values.device)
    return torch.where(is_largest, places, values.shape[1]).amin(dim=1, keepdim=True)
