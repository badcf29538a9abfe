"""Decisions in torch operations, on the device where the logits are.

The same operations as the native kernels', in the same order and each rounded, so the same
tokens (see docs/adr/0019). Nothing here waits for a GPU but `download`: once in a step, and once
for each further round that some of its rows need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from outrider.engine.sampler.draw import Draw, Greedy
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.filters import has_filters
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.race import CandidateRace, MakeRace
from outrider.engine.sampler.sequence_sampling import Decision, SampleRows
from outrider.engine.transfer import download, upload_ids
from outrider.request import SamplingParams

_MOST_VALUES = 1 << 22
"""Logits that are drawn from together: bounds the memory that a draw needs."""


class TorchDecider:
    """All arithmetic is row by row, and no sum is of floats: its order would be the device's choice."""

    def __init__(self, editor: LogitEditor, make_race: MakeRace = CandidateRace.of) -> None:
        self._editor = editor
        self._make_race = make_race

    def prepare(self, params: SamplingParams, *, sample: int, penalties: PenaltyState) -> None:
        """Nothing: rows bring what is needed."""

    @torch.inference_mode()
    def decide(self, logits: Tensor, rows: Sequence[SampleRows]) -> list[int]:
        decisions = [decision for part in rows for decision in part.decisions()]
        token_ids = [0] * len(decisions)
        rounds = list(self.first_rounds(logits, decisions))
        while rounds:
            outcomes = [each.run() for each in rounds]
            results = _read([outcome for outcome, _ in outcomes])
            rounds = []
            for (_, after), (winners, verdicts) in zip(outcomes, results, strict=True):
                for row, winner in zip(after.rows, winners, strict=True):
                    token_ids[row] = winner
                if any(verdicts):
                    rounds.append(after.again(verdicts))
        return token_ids

    def first_rounds(self, logits: Tensor, decisions: Sequence[Decision]) -> Iterator[Draw | Greedy]:
        """Rows after step 4, those together that are decided alike. Computes on the device and waits for nothing."""
        values = self._editor.edit(logits, decisions)
        greedy = [row for row, decision in enumerate(decisions) if decision.params.is_greedy]
        if greedy:
            yield Greedy(greedy, _rows_of(values, greedy))
        for is_filtered in (False, True):
            drawn = [
                row
                for row, decision in enumerate(decisions)
                if not decision.params.is_greedy and has_filters(decision.params) is is_filtered
            ]
            most = max(1, _MOST_VALUES // values.shape[1])
            for start in range(0, len(drawn), most):
                rows = drawn[start : start + most]
                yield Draw.of(rows, [decisions[row] for row in rows], _rows_of(values, rows), self._make_race)


def _rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of values [num_rows, num_ids], rising; no copy where they are all."""
    return values if len(rows) == len(values) else values.index_select(0, upload_ids(rows, values.device))


def _read(outcomes: Sequence[Tensor]) -> list[tuple[list[int], list[int]]]:
    """Winners and verdicts of each round [2, n] int64, in one transfer."""
    winners, verdicts = download(torch.cat(list(outcomes), dim=1))
    ends = accumulate((outcome.shape[1] for outcome in outcomes), initial=0)
    return [(winners[start:end], verdicts[start:end]) for start, end in pairwise(ends)]
