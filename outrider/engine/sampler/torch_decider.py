"""Decisions in torch operations, on the device where the logits are.

The same operations as the native kernels', in the same order and each rounded, so the same
tokens (see docs/adr/0019). On a CPU only blocks that can win are looked into at first, and rows that this
leaves open are decided in further rounds. On a GPU the question would be a wait: all of a row is looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.engine.sampler.draw import Draw, Greedy
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.filters import has_filters
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import Decision, SampleRows
from outrider.engine.transfer import upload_ids
from outrider.request import SamplingParams

_MOST_VALUES = 1 << 22
"""Logits that are drawn from together: bounds the memory that a draw needs."""


class TorchDecider:
    """All arithmetic is row by row, and no sum is of floats: its order would be the device's choice."""

    def __init__(self, editor: LogitEditor, *, in_one_round: bool = False) -> None:
        """`in_one_round`: all of a row is looked into, so that nothing is asked of the device."""
        self._editor = editor
        self._in_one_round = in_one_round

    def prepare(self, params: SamplingParams, *, sample: int, penalties: PenaltyState) -> None:
        """Nothing: rows bring what is needed."""

    @torch.inference_mode()
    def decide(self, logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
        decisions = [decision for part in rows for decision in part.decisions()]
        token_ids = torch.empty(len(decisions), dtype=torch.int64, device=logits.device)
        rounds = list(self.first_rounds(logits, decisions))
        while rounds:
            outcomes = [each.run() for each in rounds]
            rounds = []
            for (winners, verdicts), after in outcomes:
                token_ids.index_copy_(0, upload_ids(after.rows, logits.device), winners)
                if verdicts is not None and verdicts.any():
                    rounds.append(after.again(verdicts.tolist()))
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
                yield Draw.of(
                    rows,
                    [decisions[row] for row in rows],
                    _rows_of(values, rows),
                    is_whole=self._in_one_round,
                )


def _rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of values [num_rows, num_ids], rising; no copy where they are all."""
    return values if len(rows) == len(values) else values.index_select(0, upload_ids(rows, values.device))
