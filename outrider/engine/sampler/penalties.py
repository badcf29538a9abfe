"""One sample's state for steps 2 to 4 of the contract's SamplingParams: bans, biases, penalties, counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from outrider.request import SamplingParams

FloatRow = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


class TokenCounts:
    """How often each token of one sample was generated; prompt tokens are included with count 0.

    Sparse: memory and time depend on the number of distinct tokens, not on the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int], *, vocab_size: int) -> None:
        """Ids from `vocab_size` on are ignored, here and later: a draft model may have fewer ids than its target."""
        self._vocab_size = vocab_size
        ids = _ids_below(vocab_size, prompt_token_ids)
        self._slots: dict[int, int] = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self.ids = ids  # [capacity] int64; this and `counts` are replaced by larger arrays as needed
        self.counts = np.zeros(len(ids), dtype=np.float32)  # [capacity] float32

    def __len__(self) -> int:
        """Returns the number of distinct tokens, which is the used length of the arrays."""
        return len(self._slots)

    def add(self, token_ids: Iterable[int]) -> None:
        """Counts generated tokens, in place."""
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                continue
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot >= len(self.ids):
                room = np.zeros(max(64, len(self.ids)), dtype=np.int64)
                self.ids = np.concatenate([self.ids, room])
                self.counts = np.concatenate([self.counts, room.astype(np.float32)])
            self.ids[slot] = token_id
            self.counts[slot] += 1.0

    def with_assumed(self, token_ids: Sequence[int]) -> tuple[TokenIds, FloatRow]:
        """Returns the distinct tokens [n] int64 and their counts [n] float32, as if `token_ids` were generated too."""
        size = len(self._slots)
        if not token_ids:
            return self.ids[:size], self.counts[:size]
        counts = self.counts[:size].copy()
        unseen: dict[int, float] = {}
        for token_id in token_ids:
            slot = self._slots.get(token_id)
            if token_id >= self._vocab_size:
                continue
            if slot is None:
                unseen[token_id] = unseen.get(token_id, 0.0) + 1.0
            else:
                counts[slot] += 1.0
        ids = np.concatenate([self.ids[:size], np.asarray(list(unseen), dtype=np.int64)])
        return ids, np.concatenate([counts, np.asarray(list(unseen.values()), dtype=np.float32)])


class PenaltyState:
    """One sample's bans, biases and penalties, and the counts that they depend on.

    Deciders read the public attributes: `stop_ids` and `bias_ids` [n] int64, each id once and below vocab_size,
    `biases` [n] float32, `counts` (None: no penalties) and `num_generated`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._min_tokens = params.min_tokens
        self.num_generated = 0
        # An id beyond the logits can be neither drawn nor biased, so it is dropped.
        self.stop_ids = _ids_below(vocab_size, stop_token_ids)
        biases = [(token_id, bias) for token_id, bias in params.logit_bias if 0 <= token_id < vocab_size]
        self.bias_ids = np.asarray([token_id for token_id, _ in biases], dtype=np.int64)
        self.biases = np.asarray([bias for _, bias in biases], dtype=np.float32)
        self.counts = TokenCounts(prompt_token_ids, vocab_size=vocab_size) if params.has_penalties else None
        self.commit(generated_token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Counts committed tokens as generated."""
        self.num_generated += len(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids)

    def changes(self, num_assumed: int) -> bool:
        """Returns whether a row of logits is changed in any way, given this many assumed tokens."""
        return self.counts is not None or len(self.bias_ids) > 0 or self.bans_stops(num_assumed)

    def bans_stops(self, num_assumed: int) -> bool:
        """Returns whether `stop_ids` are banned because min_tokens is not reached even with the assumed tokens."""
        return len(self.stop_ids) > 0 and self.num_generated + num_assumed < self._min_tokens


def _ids_below(vocab_size: int, token_ids: Iterable[int]) -> TokenIds:
    ids: TokenIds = np.unique(np.asarray(tuple(token_ids), dtype=np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)]
