"""Prompt lookup: what followed the last time these tokens stood here.

Source: Saxena 2023, "Prompt Lookup Decoding"; vLLM's and transformers' n-gram proposers.
Those search the whole text at each step; here an index grows with the sequence.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from operator import itemgetter
from weakref import WeakValueDictionary

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.proposers.base import (
    MAX_INDEX_BYTES,
    MAX_INDEXED_TOKENS,
    Progress,
    Proposal,
    ProposalRequest,
    ProposerInfo,
    nothing,
)

NGRAM_SIZES = (4, 3, 2)
"""Longest first. Single tokens match so often and mean so little that their rows cost more than they win
(measured on chat, extraction and code by a 135M model, greedy and at temperature 0.7)."""

GRADES = (2, 3, 4, 8)
"""Of drafts: the least length of what matched. The more agrees before a draft, the likelier it is right."""

FIRST_SEGMENT_TOKENS = 256
SEGMENT_GROWTH = 4
"""A text outgrows few segments, and nothing is ever rebuilt."""

BYTES_PER_SLOT = array("i").itemsize

_SEED = secrets.randbits(62)
"""Nobody can choose a text whose n-grams share a slot."""


class NgramSegment:
    """Where each n-gram that ends in one stretch of a text ended last. One writer.

    Open addressing, half full: a slot holds the position behind an n-gram. The n-gram itself is read from the text, so
    segments of equal texts may be shared, and nothing else is stored.
    """

    __slots__ = ("__weakref__", "_num_slots", "_tables", "end", "limit", "num_bytes")

    def __init__(self, start: int, limit: int) -> None:
        """For positions from `start` until before `limit`."""
        self.end = start
        """Positions before it are indexed."""
        self.limit = limit
        self.num_bytes = self.bytes_of(limit - start)
        self._num_slots = 2 * (limit - start) + 1  # one is always free
        self._tables = [array("i", [-1]) * self._num_slots for _ in NGRAM_SIZES]

    @staticmethod
    def bytes_of(num_positions: int) -> int:
        return (2 * num_positions + 1) * len(NGRAM_SIZES) * BYTES_PER_SLOT

    def extend(self, text: Sequence[int], end: int) -> None:
        """Indexes the positions until before `end`, at most `limit`; each has a token of the text."""
        for position in range(self.end, end):
            for size, table in zip(NGRAM_SIZES, self._tables):  # noqa: B905 as many; strict costs time here
                if size <= position:
                    table[self._slot(table, text, position, size)] = position
        self.end = max(self.end, end)

    def find(self, text: Sequence[int], place: int, size: int) -> int:
        """The latest position behind the n-gram that ends the text, by the table at `place`; -1: there is none."""
        table = self._tables[place]
        return table[self._slot(table, text, len(text), size)]

    def _slot(self, table: array[int], text: Sequence[int], end: int, size: int) -> int:
        """That of the n-gram before `end`, or the free one where it belongs."""
        ngram = text[end - size : end]
        slot = hash((_SEED, *ngram)) % self._num_slots
        while (position := table[slot]) >= 0 and text[position - size : position] != ngram:
            slot = slot + 1 if slot + 1 < self._num_slots else 0
        return slot


class NgramIndex:
    """The n-grams of one growing text, but for those at its end: the first segment is its prompt's, others its own.

    Adding a token and looking up cost the same however long the text is.
    """

    __slots__ = ("_last_token_id", "segments")

    def __init__(self, prompt: NgramSegment) -> None:
        self.segments = [prompt]
        self._last_token_id = -1

    def __len__(self) -> int:
        """Tokens of the text that are indexed."""
        return self.segments[-1].end

    def is_of(self, text: Sequence[int]) -> bool:
        """Whether the text may be the one that was indexed; looks at the last indexed token only."""
        size = len(self)
        return size <= len(text) and (self._last_token_id < 0 or text[size - 1] == self._last_token_id)

    def num_new_positions(self, end: int) -> int:
        """Of the segment that `extend` would add; 0: none, as at most steps."""
        num_missing = end - self.segments[-1].limit
        if num_missing <= 0:
            return 0
        usual: int = FIRST_SEGMENT_TOKENS * SEGMENT_GROWTH ** (len(self.segments) - 1)
        return max(num_missing, usual)

    def extend(self, text: Sequence[int], end: int) -> None:
        """Indexes the positions until before `end`; each has a token of the text."""
        last = self.segments[-1]
        if num_positions := self.num_new_positions(end):
            last.extend(text, last.limit)
            last = NgramSegment(last.limit, last.limit + num_positions)
            self.segments.append(last)
        last.extend(text, end)
        self._last_token_id = text[end - 1]

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """The position behind the latest earlier occurrence of the longest n-gram that ends the text, and its grade.

        (0, 0): there is none.
        """
        for place, size in enumerate(NGRAM_SIZES):
            if size > len(text):
                continue
            for segment in reversed(self.segments):
                start = segment.find(text, place, size)
                if start >= 0:
                    return start, size if place else _grade(text, start, size)
        return 0, 0

    def continuation(self, text: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], int]:
        """What followed there, and its grade.

        A continuation that reaches the text's end goes on with itself: a text that has
        begun to repeat is taken to go on repeating.
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
    """The highest that the text's ending reaches, of which `size` tokens are known to stand before `start` as well."""
    grade = size
    for longer in GRADES[GRADES.index(size) + 1 :]:
        if longer > start or text[start - longer : start - grade] != text[len(text) - longer : len(text) - grade]:
            break
        grade = longer
    return grade


class NgramProposer:
    """Proposes from the sequence's own text; needs no model and works on any vocabulary.

    Not thread-safe: one owner. Also runs in the decode node. Sequences with equal prompts, as the samples of a request,
    share their prompt's part of the index. A sequence for which there is no memory gets no drafts until there is.
    """

    def __init__(self, *, max_bytes: int = MAX_INDEX_BYTES) -> None:
        """`max_bytes`: of all indexes."""
        self.info = ProposerInfo(name="ngram", memory_bytes=max_bytes)
        self.num_wasted_tokens = 0
        self.num_bytes = 0
        self._indexes: dict[int, NgramIndex] = {}
        self._prompts: WeakValueDictionary[tuple[int, int], NgramSegment] = WeakValueDictionary()  # by length and hash

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where no n-gram repeats. What lacks least is indexed first."""
        num_left = MAX_INDEXED_TOKENS
        found: dict[int, Proposal] = {}
        asked: list[tuple[int, ProposalRequest, NgramIndex]] = []  # first: tokens that are not indexed
        for request in requests:
            index = self._index(request)
            if index is None:
                found[request.sequence_id] = nothing(request)
            else:
                asked.append((len(request.token_ids) - len(index), request, index))
        for num_missing, request, index in sorted(asked, key=itemgetter(0)):
            text = request.token_ids
            start = len(index)  # of a shared prompt others may have indexed more since
            end = min(len(text), start + num_left) if num_missing else start
            if start < end:
                num_new_positions = index.num_new_positions(end)
                num_bytes = NgramSegment.bytes_of(num_new_positions) if num_new_positions else 0
                if self.num_bytes + num_bytes > self.info.memory_bytes:
                    found[request.sequence_id] = nothing(request)
                    continue
                self.num_bytes += num_bytes
                index.extend(text, end)
                num_left -= end - start
            if end < len(text):
                found[request.sequence_id] = nothing(request, Progress.CATCHING_UP, num_behind=len(text) - end)
                continue
            token_ids, grade = index.continuation(text, request.num_wanted) if request.num_wanted > 0 else ((), 0)
            tree = DraftTree(len(text), token_ids=token_ids, grade=grade)
            found[request.sequence_id] = Proposal(sequence_id=request.sequence_id, tree=tree)
        return [found[request.sequence_id] for request in requests]

    def forget(self, sequence_id: int) -> None:
        if self._indexes.pop(sequence_id, None) is not None:
            segments = {segment for index in self._indexes.values() for segment in index.segments}
            self.num_bytes = sum(segment.num_bytes for segment in segments)

    def _index(self, request: ProposalRequest) -> NgramIndex | None:
        """None: its prompt is not complete yet, or there is no memory for it."""
        index, text = self._indexes.get(request.sequence_id), request.token_ids
        if index is not None and index.is_of(text):
            return index
        self.forget(request.sequence_id)
        length = len(text) if request.start is None else request.start.prompt_length
        if len(text) < length:
            return None
        key = (length, prefix_hash(text[:length]))
        prompt = self._prompts.get(key)
        if prompt is None:
            num_bytes = NgramSegment.bytes_of(length)
            if self.num_bytes + num_bytes > self.info.memory_bytes:
                return None
            prompt = self._prompts[key] = NgramSegment(0, length)
            self.num_bytes += num_bytes
        index = self._indexes[request.sequence_id] = NgramIndex(prompt)
        return index
