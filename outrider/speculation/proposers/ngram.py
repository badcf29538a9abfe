"""Prompt lookup: what followed the last time these tokens stood here.

Source: Saxena 2023, "Prompt Lookup Decoding"; vLLM's and transformers' n-gram proposers.
Those search the whole text at each step; here an index grows with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import (
    MAX_INDEXED_TOKENS,
    LookupProposer,
    Proposal,
    ProposalRequest,
    catching_up,
)

MAX_NGRAM = 4
MIN_NGRAM = 2
"""Single tokens match so often and mean so little that their rows cost more than they win
(measured on chat, extraction and code by a 135M model, greedy and at temperature 0.7)."""


class NgramIndex:
    """Where each n-gram of a growing text last ended, but for the text's own end.

    Adding a token and looking up cost O(max_ngram) however long the text is.
    """

    __slots__ = ("_last_end", "_sizes", "_token_ids")

    def __init__(self, *, max_ngram: int, min_ngram: int) -> None:
        self._sizes = tuple(range(max_ngram, min_ngram - 1, -1))
        self._last_end: dict[tuple[int, ...], int] = {}
        self._token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def is_prefix_of(self, token_ids: Sequence[int]) -> bool:
        """Whether the text may have grown into `token_ids`; looks at the newest token only."""
        size = len(self._token_ids)
        return size <= len(token_ids) and (size == 0 or self._token_ids[-1] == token_ids[size - 1])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens. What ended the text until now has a continuation then, and is indexed."""
        text, last_end = self._token_ids, self._last_end
        for token_id in token_ids:
            end = len(text)
            for size in self._sizes:
                if size <= end:
                    last_end[tuple(text[end - size :])] = end
            text.append(token_id)

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed the longest n-gram that ends the text, at its latest earlier occurrence.

        A continuation that reaches the text's end goes on with itself: a text that has
        begun to repeat is taken to go on repeating.
        """
        text = self._token_ids
        for size in self._sizes:
            if size > len(text):
                continue
            start = self._last_end.get(tuple(text[len(text) - size :]))
            if start is not None:
                period = len(text) - start
                found = text[start : start + num_tokens]
                while len(found) < num_tokens:
                    found.append(found[len(found) - period])
                return tuple(found)
        return ()


class NgramProposer(LookupProposer):
    """Proposes from the sequence's own text; needs no model and works on any vocabulary.

    Not thread-safe: one owner. Also the decode node's local fallback.
    """

    def __init__(self, *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._indexes: dict[int, NgramIndex] = {}

    @property
    def name(self) -> str:
        return "ngram"

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where no n-gram repeats."""
        found: list[Proposal] = []
        num_left = MAX_INDEXED_TOKENS
        for request in requests:
            index, length = self._index(request), len(request.token_ids)
            start = len(index)
            if start < length:
                index.extend(request.token_ids[start : start + num_left])
                num_left -= len(index) - start
            if len(index) < length:
                found.append(catching_up(request, len(index)))
                continue
            token_ids = index.continuation(request.num_wanted) if request.num_wanted > 0 else ()
            found.append(Proposal(sequence_id=request.sequence_id, tree=DraftTree(length, token_ids=token_ids)))
        return found

    def forget(self, sequence_id: int) -> None:
        """Frees the index of a sequence; an unknown one is fine."""
        self._indexes.pop(sequence_id, None)

    def _index(self, request: ProposalRequest) -> NgramIndex:
        index = self._indexes.get(request.sequence_id)
        if index is None or not index.is_prefix_of(request.token_ids):
            index = NgramIndex(max_ngram=self._max_ngram, min_ngram=self._min_ngram)
            self._indexes[request.sequence_id] = index
        return index
