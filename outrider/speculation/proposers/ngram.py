"""Prompt lookup: proposes what followed the last occurrence of the text's ending.

Source: Saxena 2023, "Prompt Lookup Decoding"; vLLM's and transformers' n-gram proposers. Like these, it searches the
whole text in each step: one comparison of 8 bytes per token, where attention reads kilobytes per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import (
    MAX_INDEX_BYTES,
    Progress,
    Proposal,
    ProposalRequest,
    ProposerInfo,
    nothing,
)

NGRAM_SIZES = (4, 3, 2)
"""Sizes of n-grams, longest first. Single tokens match often but predict little, so that their rows cost more than they
gain (measured on chat, extraction and code with a 135M model, greedy and at temperature 0.7).
"""

GRADES = (2, 3, 4, 8)
"""Grades of drafts. A grade is the minimum length of the match; longer matches make drafts likelier to be accepted."""

MAX_READ_TOKENS = 4096
"""Maximum number of tokens that one call reads, in some 0.2 ms. Longer prompts take several calls."""

BYTES_PER_TOKEN = 8


class NgramIndex:
    """The pairs of neighbouring tokens of one growing text, which can be searched without the interpreter.

    On a server processor a search takes 5 µs in a text of 8,000 tokens and 35 µs in one of 128,000.
    """

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs = array("q")  # for each token, the token before it and the token itself, 32 bits each

    def __len__(self) -> int:
        """The number of tokens read."""
        return len(self._pairs)

    def is_of(self, text: Sequence[int]) -> bool:
        """Returns whether the text may be the one that was read. It compares only the last token that was read."""
        size = len(self._pairs)
        return size <= len(text) and (not size or text[size - 1] == self._pairs[-1] & 0xFFFFFFFF)

    def extend(self, text: Sequence[int], end: int) -> None:
        """Reads the tokens before `end`, of which the text must have that many."""
        start = len(self._pairs)
        ids = [text[start - 1] if start else -1, *text[start:end]]
        if len(ids) <= 32:  # fewer instructions than numpy, which a step has evicted from the caches
            self._pairs.extend([before << 32 | token_id for before, token_id in pairwise(ids)])
            return
        pairs = np.array(ids, dtype=np.int64)
        self._pairs.frombytes((pairs[:-1] << 32 | pairs[1:]).tobytes())

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Looks for the latest earlier occurrence of the longest n-gram that ends the text, all of which is read.

        Returns the position after this occurrence, and the match's grade; (0, 0) if there is none.
        """
        if len(self._pairs) <= min(NGRAM_SIZES):
            return 0, 0
        pairs = np.frombuffer(self._pairs, dtype=np.int64)
        (ends,) = (pairs[:-1] == pairs[-1]).nonzero()  # the last tokens of the earlier occurrences of the last two
        if not len(ends):
            return 0, 0
        for size in NGRAM_SIZES[:-1]:
            num_more = size - 2
            longer = ends[ends > num_more]
            longer = longer[pairs[longer - num_more] == pairs[-1 - num_more]]
            if len(longer):
                start = int(longer[-1]) + 1
                return start, _grade(text, start, size) if size == NGRAM_SIZES[0] else size
        return int(ends[-1]) + 1, NGRAM_SIZES[-1]

    def continuation(self, text: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Returns the tokens that followed the occurrence found by `find`, and their grade.

        If these tokens reach the text's end, they are repeated, because a text that has begun to repeat itself is
        assumed to go on.
        """
        start, grade = self.find(text)
        if not start:
            return (), 0
        found = list(text[start : start + num_tokens])
        period = len(text) - start
        while len(found) < num_tokens:
            found.append(found[len(found) - period])
        return tuple(found), grade


def _grade(text: Sequence[int], start: int, size: int) -> int:
    """Returns the highest grade of the match before `start`, given that its last `size` tokens match."""
    grade = size
    for longer in GRADES[GRADES.index(size) + 1 :]:
        if longer > start or text[start - longer : start - grade] != text[len(text) - longer : len(text) - grade]:
            break
        grade = longer
    return grade


class NgramProposer:
    """Proposes from the sequence's own text. It needs no model and works on any vocabulary. One thread owns it.

    It also runs in the decode node. A sequence gets no drafts while there is no memory for its text.
    """

    def __init__(self, *, max_bytes: int = MAX_INDEX_BYTES) -> None:
        """`max_bytes`: limit of the memory of all texts."""
        self.info = ProposerInfo(name="ngram", memory_bytes=max_bytes)
        self.num_wasted_tokens = 0
        self.num_tokens = 0
        """Number of tokens read, of all sequences."""
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, empty if no n-gram repeats. Nearly complete texts are read first."""
        num_left = MAX_READ_TOKENS
        found: dict[int, Proposal] = {}
        indexes = {request.sequence_id: self._index(request) for request in requests}
        for request in sorted(requests, key=lambda each: len(each.token_ids) - len(indexes[each.sequence_id])):
            text, index = request.token_ids, indexes[request.sequence_id]
            num_missing = len(text) - len(index)
            num_new = min(num_missing, num_left, self._max_tokens - self.num_tokens)
            if num_new:
                index.extend(text, len(index) + num_new)
                num_left -= num_new
                self.num_tokens += num_new
            if num_new < num_missing:
                progress = Progress.DONE if self.num_tokens >= self._max_tokens else Progress.CATCHING_UP
                found[request.sequence_id] = nothing(request, progress, num_behind=num_missing - num_new)
                continue
            token_ids, grade = index.continuation(text, request.num_wanted) if request.num_wanted > 0 else ((), 0)
            tree = DraftTree(len(text), None, token_ids, grade=grade)
            found[request.sequence_id] = Proposal(request.sequence_id, tree)
        return [found[request.sequence_id] for request in requests]

    def forget(self, sequence_id: int) -> None:
        index = self._indexes.pop(sequence_id, None)
        if index is not None:
            self.num_tokens -= len(index)

    def _index(self, request: ProposalRequest) -> NgramIndex:
        index = self._indexes.get(request.sequence_id)
        if index is None or not index.is_of(request.token_ids):
            self.forget(request.sequence_id)
            index = self._indexes[request.sequence_id] = NgramIndex()
        return index
