"""Steps 1 to 4 of the contract's SamplingParams: what is taken out of, or added to, rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import upload, upload_ids

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Edits:
    """Bans, biases and penalties of the rows that have any.

    Entries i of `places` and `numbers` belong together; those of changed row r are its bans from starts[3 r] on, its
    biases from starts[3 r + 1], its penalties from starts[3 r + 2], each token once.
    """

    starts: Ints  # [3 * num_changed + 1]
    factors: Floats  # [num_changed, 3]: repetition, frequency and presence penalty
    places: Ints  # [num_entries] in all logits of the step, taken as one row
    numbers: Floats  # [num_entries]: nothing of a ban, a bias, or how often a token was generated

    @classmethod
    def of(cls, changed: Sequence[tuple[int, Decision]]) -> Edits:
        """Of rows, each with the place where its logits begin: at least one."""
        starts, places, numbers = [0], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]

        def add(ids: Ints, values: Floats, start: int) -> None:
            places.append(start + ids)
            numbers.append(values)
            starts.append(starts[-1] + len(ids))

        nothing = places[0], numbers[0]
        for start, decision in changed:
            penalties, assumed = decision.state.penalties, decision.assumed_token_ids
            stop_ids = penalties.stop_ids if penalties.bans_stops(len(assumed)) else nothing[0]
            add(stop_ids, np.zeros(len(stop_ids), dtype=np.float32), start)
            add(penalties.bias_ids, penalties.biases, start)
            add(*(nothing if penalties.counts is None else penalties.counts.with_assumed(assumed)), start)
        factors = [
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            for params in (decision.params for _, decision in changed)
        ]
        return cls(
            np.asarray(starts, dtype=np.int64),
            np.asarray(factors, dtype=np.float32),
            np.concatenate(places),
            np.concatenate(numbers),
        )

    def packed(self) -> Ints:
        """All of it in one array, as the Triton kernel reads it; float32 as its bits."""
        factors, numbers = (each.view(np.int32).astype(np.int64).ravel() for each in (self.factors, self.numbers))
        return np.concatenate([self.starts, factors, self.places, numbers])


ApplyEdits = Callable[[Tensor, Edits], None]
"""Changes all logits of a step, given as one row, in place."""


def apply_in_torch(flat: Tensor, edits: Edits) -> None:
    """As `ApplyEdits`."""
    sizes = np.diff(edits.starts)
    kinds = np.repeat(np.arange(len(sizes)) % 3, sizes)
    bans, biases, penalties = (np.flatnonzero(kinds == kind) for kind in range(3))
    if bans.size:
        flat.index_fill_(0, upload(edits.places[bans], flat.device), -torch.inf)
    if biases.size:
        places = upload(edits.places[biases], flat.device)
        flat.index_copy_(0, places, flat.index_select(0, places) + upload(edits.numbers[biases], flat.device))
    if penalties.size:
        places = upload(edits.places[penalties], flat.device)
        factors = np.repeat(edits.factors, sizes[2::3], axis=0).T  # [3, n]
        repetition, frequency, presence = upload(factors, flat.device).unbind(0)
        counts = upload(edits.numbers[penalties], flat.device)
        values = flat.index_select(0, places)
        values = torch.where(values > 0.0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0.0)
        flat.index_copy_(0, places, values)


def apply_by_kernel(flat: Tensor, edits: Edits) -> None:
    """As `ApplyEdits`, in one transfer and one launch."""
    from outrider.engine.gpu_kernels.edits import edit_in_place

    packed = upload(edits.packed(), flat.device)
    edit_in_place(flat, packed, num_changed=len(edits.factors), num_entries=len(edits.places))


class LogitEditor:
    """Edits rows on the device where they are, all of a step together."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device, apply: ApplyEdits = apply_in_torch) -> None:
        self.vocabulary = vocabulary
        self._apply = apply
        self._num_ids = vocabulary.num_ids
        self._holes: Tensor | None = None  # [num_ids] bool; None: there is none
        if vocabulary.holes.size:
            holes = np.zeros(vocabulary.num_ids, dtype=np.bool_)
            holes[vocabulary.holes] = True
            self._holes = upload(holes, device)

    def edit(self, logits: Tensor, decisions: Sequence[Decision]) -> Tensor:
        """Holes and what constraints forbid go, then bans, biases and penalties apply.

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
        masked = [row for row, decision in enumerate(decisions) if decision.mask is not None]
        if not changed and not masked and self._holes is None:
            return logits.narrow(1, 0, self._num_ids)
        logits = logits.clone(memory_format=torch.contiguous_format)
        values = logits.narrow(1, 0, self._num_ids)
        if self._holes is not None:
            values.masked_fill_(self._holes, -torch.inf)
        if masked:
            words = np.stack([mask for each in decisions if (mask := each.mask) is not None])
            rows = upload_ids(masked, values.device)
            is_out = _unpacked(upload(words, values.device), self._num_ids).logical_not_()
            values.index_copy_(0, rows, values.index_select(0, rows).masked_fill_(is_out, -torch.inf))
        if changed:
            self._apply(logits.view(-1), Edits.of(changed))
        return values


def _unpacked(words: Tensor, num_ids: int) -> Tensor:
    """Masks [num_rows, num_words] int32, a bit for each token, as [num_rows, num_ids] bool."""
    places = torch.arange(32, device=words.device, dtype=torch.int32)
    bits = (words.unsqueeze(2) >> places) & 1  # [num_rows, num_words, 32]
    return bits.flatten(1).narrow(1, 0, num_ids).to(torch.bool)
