"""Decisions by numpy: for processors and installations without native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outrider.engine.sampler.arrivals import BLOCK_SIZE, ArrivalCache, RaceKey
from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.filters import Filters, has_filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.race import run_race
from outrider.engine.sampler.sequence_sampling import SampleRows, SequenceSampling
from outrider.request import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Decision:
    """One logits row and whom it is for."""

    index: int  # logits row
    state: SequenceSampling
    position: int  # absolute
    assumed_token_ids: tuple[int, ...]  # count as generated, besides the committed

    @property
    def is_greedy(self) -> bool:
        return self.state.params.is_greedy

    @property
    def race_key(self) -> RaceKey:
        return RaceKey(self.state.params.seed, self.state.sample, self.position)


@dataclass(frozen=True, slots=True)
class _Group:
    """Decisions that are taken together: all greedy or none, and from one matrix."""

    logits: Floats  # [num_logits, vocab] float32, after steps 1 to 4
    rows: Ints  # [num_decisions] int64, index into `logits`
    decisions: list[_Decision]


class NumpyDecider:
    """All arithmetic is row by row, in float32. Keeps a cache of arrivals."""

    def __init__(self, vocabulary: Vocabulary, *, arrival_cache_bytes: int) -> None:
        self._vocabulary = vocabulary
        num_blocks = -(-vocabulary.num_ids // BLOCK_SIZE)
        self._arrivals = ArrivalCache(num_blocks=num_blocks, max_bytes=arrival_cache_bytes)

    def prepare(self, params: SamplingParams, *, sample: int, penalties: PenaltyState) -> None:
        """Nothing: rows bring what is needed."""

    def decide(self, logits: Tensor, rows: Sequence[SampleRows]) -> list[int]:
        token_ids = [0] * len(logits)
        with np.errstate(over="ignore", invalid="ignore"):
            for group in self._groups(logits.numpy(), _decisions(rows)):
                for row, token_id in zip(group.decisions, self._decide(group), strict=True):
                    token_ids[row.index] = token_id
        return token_ids

    def _groups(self, logits: Floats, decisions: Sequence[_Decision]) -> list[_Group]:
        """Rows after steps 1 to 4. Those that these change are copies; greedy and drawn rows part."""
        as_they_are = [row for row in decisions if not self._changes(row)]
        changed = [row for row in decisions if self._changes(row)]
        edited = logits[[row.index for row in changed]]
        for edited_row, row in zip(edited, changed, strict=True):
            self._vocabulary.edit(edited_row, row.state.penalties, row.assumed_token_ids)
        groups = [
            (logits, [(row.index, row) for row in as_they_are]),
            (edited, list(enumerate(changed))),
        ]
        return [
            _Group(matrix, np.asarray([place for place, _ in chosen], dtype=np.int64), [row for _, row in chosen])
            for matrix, placed in groups
            for is_greedy in (True, False)
            if (chosen := [(place, row) for place, row in placed if row.is_greedy == is_greedy])
        ]

    def _changes(self, row: _Decision) -> bool:
        return self._vocabulary.edits(row.state.penalties, len(row.assumed_token_ids))

    def _decide(self, group: _Group) -> list[int]:
        """Steps 5 to 7."""
        num_ids = self._vocabulary.num_ids
        if group.decisions[0].is_greedy:
            everything = len(group.rows) == len(group.logits)
            logits = group.logits if everything else group.logits[group.rows]
            return logits[:, :num_ids].argmax(axis=1).tolist()  # numpy promises the first of equals
        temperatures = np.asarray([row.state.params.temperature for row in group.decisions], dtype=np.float32)
        return self._draw(group, LogitBlocks.of(group.logits, group.rows, temperatures, num_ids=num_ids))

    def _draw(self, group: _Group, blocks: LogitBlocks) -> list[int]:
        """Steps 6 and 7: the race of each row among what its filters keep."""
        keys = [row.race_key for row in group.decisions]
        arrivals = self._arrivals.rows(keys)
        if not any(has_filters(row.state.params) for row in group.decisions):
            return run_race(blocks, arrivals, keys)
        filters = Filters([row.state.params for row in group.decisions], blocks)
        token_ids = run_race(blocks, arrivals, keys, filters.limits)
        # Rows whose winner top_p leaves out run again among the tokens before it. Each time
        # the limit comes strictly earlier, and the first token is always kept: this ends.
        again = filters.outside(range(len(keys)), token_ids)
        while again:
            rows = np.asarray(list(again), dtype=np.int64)
            winners = run_race(
                blocks.select(rows), arrivals.select(rows), [keys[row] for row in again], list(again.values())
            )
            for row, token_id in zip(again, winners, strict=True):
                token_ids[row] = token_id
            again = filters.outside(list(again), winners)
        return token_ids


def _decisions(rows: Sequence[SampleRows]) -> list[_Decision]:
    """One for each logits row, in order."""
    decisions: list[_Decision] = []
    for part in rows:
        for j in range(part.num_rows):
            decisions.append(_Decision(len(decisions), part.state, part.position + j, part.assumed_at(j)))
    return decisions
