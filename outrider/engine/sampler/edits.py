"""Steps 1 to 4 of the contract's SamplingParams: bans, biases and penalties on rows of logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import Array, ids_like, namespace, to_array_like, without_warnings
from outrider.engine.sampler.sequence_sampling import Decision

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that can be drawn: those below `num_ids`, except holes. Ids from `num_ids` on are padding."""

    size: int  # width of the logits
    num_ids: int  # 1 to size
    holes: Ints  # [n] int64: ids below num_ids that no token has, ascending

    @classmethod
    def of(cls, known: npt.NDArray[np.bool_]) -> Vocabulary:
        """Makes a vocabulary from a mask [size] bool with at least one known id."""
        assert known.any(), "no known token"
        num_ids = int(np.flatnonzero(known)[-1]) + 1
        return cls(len(known), num_ids, np.flatnonzero(~known[:num_ids]))


@dataclass(frozen=True, slots=True)
class Edits:
    """Bans, biases and penalties of the changed rows, which are the rows of a step that have any.

    Entries with equal indices in `places` and `numbers` belong together. The bans of changed row r begin at
    starts[3 r], its biases at starts[3 r + 1], its penalties at starts[3 r + 2]. No part has the same token twice.
    """

    starts: Ints  # [3 * num_changed + 1]
    factors: Floats  # [num_changed, 3]: repetition, frequency and presence penalty
    places: Ints  # [num_entries]: indices into the flattened logits of the step
    numbers: Floats  # [num_entries]: the bias, or how often the token was generated; unused for a ban

    @classmethod
    def of(cls, changed: Sequence[tuple[int, Decision]]) -> Edits:
        """Collects the edits of one or more rows, each given with the index of its first logit."""
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
        """Returns all fields in one array for the Triton kernel; float32 values are given as their bits."""
        factors, numbers = (each.view(np.int32).astype(np.int64).ravel() for each in (self.factors, self.numbers))
        return np.concatenate([self.starts, factors, self.places, numbers])


ApplyEdits = Callable[[Array, Edits], None]
"""A function that edits in place all logits of a step, which are given as one flat array."""


@without_warnings
def apply_to_array(flat: Array, edits: Edits) -> None:
    """Implements `ApplyEdits` for arrays."""
    sizes = np.diff(edits.starts)
    kinds = np.repeat(np.arange(len(sizes)) % 3, sizes)
    bans, biases, penalties = (np.flatnonzero(kinds == kind) for kind in range(3))
    if bans.size:
        flat[to_array_like(edits.places[bans], flat)] = -math.inf
    if biases.size:
        places = to_array_like(edits.places[biases], flat)
        flat[places] = flat[places] + to_array_like(edits.numbers[biases], flat)
    if penalties.size:
        places = to_array_like(edits.places[penalties], flat)
        repetition, frequency, presence = to_array_like(
            np.repeat(edits.factors, sizes[2::3], axis=0).T, flat
        )  # [n] each
        counts = to_array_like(edits.numbers[penalties], flat)
        values = flat[places]
        values = namespace(flat).where(values > 0.0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0.0)
        flat[places] = values


def apply_by_kernel(flat: Array, edits: Edits) -> None:
    """Implements `ApplyEdits` with one transfer and one kernel launch."""
    from outrider.engine.gpu_kernels.edits import edit_in_place

    packed = to_array_like(edits.packed(), flat)
    edit_in_place(flat, packed, num_changed=len(edits.factors), num_entries=len(edits.places))


class LogitEditor:
    """Edits all rows of a step together on their device. All logits must be of one array library and device."""

    def __init__(self, vocabulary: Vocabulary, apply: ApplyEdits = apply_to_array) -> None:
        self.vocabulary = vocabulary
        self._apply = apply
        self._num_ids = vocabulary.num_ids
        self._holes: Array | None = None  # [num_ids] bool, on the logits' device after the first step; None: no holes
        if vocabulary.holes.size:
            self._holes = np.zeros(vocabulary.num_ids, dtype=np.bool_)
            self._holes[vocabulary.holes] = True

    def edit(self, logits: Array, decisions: Sequence[Decision]) -> Array:
        """Bans unknown ids and tokens that constraints forbid, then applies bans, biases and penalties.

        Args:
            logits: [num_rows, vocab_size] float32, not changed.
            decisions: one for each row.

        Returns:
            [num_rows, num_ids] float32, a view of the logits if nothing changes.
        """
        changed = [
            (row * logits.shape[1], decision)
            for row, decision in enumerate(decisions)
            if decision.state.penalties.changes(len(decision.assumed_token_ids))
        ]
        masked = [row for row, decision in enumerate(decisions) if decision.mask is not None]
        if not changed and not masked and self._holes is None:
            return logits[:, : self._num_ids]
        xp = namespace(logits)
        flat = xp.astype(xp.reshape(logits, (-1,)), xp.float32)  # a copy
        values = xp.reshape(flat, logits.shape)[:, : self._num_ids]  # shares its memory
        if self._holes is not None:
            if isinstance(self._holes, np.ndarray):
                self._holes = to_array_like(self._holes, logits)
            values[:] = xp.where(self._holes, -math.inf, values)
        if masked:
            words = np.stack([mask for each in decisions if (mask := each.mask) is not None])
            rows, is_allowed = ids_like(masked, logits), _unpacked(to_array_like(words, logits), self._num_ids)
            values[rows] = xp.where(is_allowed, values[rows], -math.inf)
        if changed:
            self._apply(flat, Edits.of(changed))
        return values


def _unpacked(words: Array, num_ids: int) -> Array:
    """Unpacks masks [num_rows, num_words] int32, one bit per token, to [num_rows, num_ids] bool."""
    xp = namespace(words)
    bits = (words[:, :, None] >> xp.arange(32, dtype=xp.int32, device=words.device)) & 1  # [num_rows, num_words, 32]
    return xp.reshape(bits, (words.shape[0], -1))[:, :num_ids] > 0
