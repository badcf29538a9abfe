"""Steps 1 to 4 of the contract's SamplingParams: what is taken out of, or added to, rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import upload

Ints = npt.NDArray[np.int64]


class LogitEditor:
    """Edits rows on the device where they are, all of a step together."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._num_ids = vocabulary.num_ids
        self._holes: Tensor | None = None  # [num_ids] bool; None: there is none
        if vocabulary.holes.size:
            holes = np.zeros(vocabulary.num_ids, dtype=np.bool_)
            holes[vocabulary.holes] = True
            self._holes = upload(holes, device)

    def edit(self, logits: Tensor, decisions: Sequence[Decision]) -> Tensor:
        """Holes go, then bans, biases and penalties apply.

        Args:
            logits: [num_rows, vocab_size] float32, not changed.
            decisions: one for each row.

        Returns:
            [num_rows, num_ids] float32, a view of the logits where nothing changes.
        """
        changed = [
            (row * logits.shape[1], decision)
            for row, decision in enumerate(decisions)
            if decision.state.penalties.changes(len(decision.assumed_token_ids))
        ]
        if not changed and self._holes is None:
            return logits.narrow(1, 0, self._num_ids)
        logits = logits.clone(memory_format=torch.contiguous_format)
        values = logits.narrow(1, 0, self._num_ids)
        if self._holes is not None:
            values.masked_fill_(self._holes, -torch.inf)
        flat = logits.view(-1)
        _ban(flat, changed)
        _add_biases(flat, changed)
        _penalise(flat, changed)
        return values


# Each of these takes all logits of a step as one row, and where the rows that it changes begin.
_Changed = Sequence[tuple[int, Decision]]


def _ban(flat: Tensor, changed: _Changed) -> None:
    places = [
        start + decision.state.penalties.stop_ids
        for start, decision in changed
        if decision.state.penalties.bans_stops(len(decision.assumed_token_ids))
    ]
    if places:
        flat.index_fill_(0, upload(np.concatenate(places), flat.device), -torch.inf)


def _add_biases(flat: Tensor, changed: _Changed) -> None:
    penalties = [(start, decision.state.penalties) for start, decision in changed]
    if not any(len(each.bias_ids) for _, each in penalties):
        return
    places = upload(np.concatenate([start + each.bias_ids for start, each in penalties]), flat.device)
    biases = upload(np.concatenate([each.biases for _, each in penalties]), flat.device)
    flat.index_copy_(0, places, flat.index_select(0, places) + biases)


def _penalise(flat: Tensor, changed: _Changed) -> None:
    places: list[Ints] = []
    factors: list[npt.NDArray[np.float32]] = []  # each [4, n]
    for start, decision in changed:
        counted = decision.state.penalties.counts
        if counted is None:
            continue
        ids, counts = counted.with_assumed(decision.assumed_token_ids)
        params = decision.params
        of_row = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        places.append(start + ids)
        factors.append(np.stack([counts, *(np.full(len(ids), each, dtype=np.float32) for each in of_row)]))
    if not places:
        return
    where = upload(np.concatenate(places), flat.device)
    counts_of, repetition, frequency, presence = upload(np.concatenate(factors, axis=1), flat.device).unbind(0)
    values = flat.index_select(0, where)
    values = torch.where(values > 0.0, values / repetition, values * repetition)
    values -= frequency * counts_of
    values -= presence * (counts_of > 0.0)
    flat.index_copy_(0, where, values)
