"""Decides tokens with numpy or torch operations, on the device of the logits.

The operations are those of the native kernels, in the same order and each rounded, so the tokens are the same (see
docs/adr/0019). Every arrival time of a row is drawn. The kernels skip tokens that cannot win, but here that test would
have to wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.arrays import Array, ids_like, namespace
from outrider.engine.sampler.arrivals import arrivals_of, words_of
from outrider.engine.sampler.distribution import sampling_distribution
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.order import first_argmax
from outrider.engine.sampler.sequence_sampling import Decision, SampleRows

_MAX_VALUES = 1 << 22
"""Maximum number of logits that are processed together, to bound the memory of a draw."""


class ArrayDecider:
    """Decides each row separately. It adds no floats, because the order of a sum would depend on the device."""

    def __init__(self, editor: LogitEditor) -> None:
        self._editor = editor

    def decide(self, logits: Array, rows: Sequence[SampleRows]) -> Array:
        decisions = [decision for part in rows for decision in part.decisions()]
        values = self._editor.edit(logits, decisions)
        most = max(1, _MAX_VALUES // values.shape[1])
        starts = range(0, len(decisions), most)
        parts = [_decide(values[start : start + most], decisions[start : start + most]) for start in starts]
        return namespace(logits).concat(parts)


def _decide(values: Array, decisions: Sequence[Decision]) -> Array:
    """Applies steps 5 to 7: [num_rows, num_ids] float32 -> [num_rows] int64."""
    drawn = [row for row, decision in enumerate(decisions) if not decision.params.is_greedy]
    if drawn:
        values = sampling_distribution(values, decisions)
        keys = words_of([decisions[row].key for row in drawn], values)
        handicaps = logarithm(arrivals_of(keys, values.shape[1]))
        if len(drawn) == len(decisions):
            values = values - handicaps
        else:
            values[ids_like(drawn, values)] -= handicaps
    return first_argmax(values)
