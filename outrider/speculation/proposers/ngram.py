"""Prompt lookup: proposes what followed the last occurrence of the text's ending.

Source: Saxena 2023, "Prompt Lookup Decoding"; vLLM's and transformers' n-gram proposers. These search the whole text
in each step, whereas here an index grows with the sequence.
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
"""Sizes of n-grams, longest first. Single tokens match often but predict little, so that their rows cost more than they
gain (measured on chat, extraction and code with a 135M model, greedy and at temperature 0.7).
"""

GRADES = (2, 3, 4, 8)
"""Grades of drafts. A grade is the minimum length of the match; longer matches make drafts likelier to be accepted."""

FIRST_SEGMENT_TOKENS = 256
SEGMENT_GROWTH = 4
"""Size in tokens of the first segment after the prompt's, and the factor by which the next ones grow. So a text has few
segments, and none is ever rebuilt.
"""

BYTES_PER_SLOT = array("i").itemsize

_SEED = secrets.randbits(62)
"""A random seed, so that nobody can choose a text whose n-grams share a slot."""


class NgramSegment:
    """The last position of each n-gram that ends in one segment of a text. It has one writer.

    It is an open-addressing hash table that is at most half full. A slot holds the position after an n-gram. The n-gram
    itself is read from the text, so segments of equal texts may be shared, and nothing else is stored.
    """

    __slots__ = ("__weakref__", "_num_slots", "_tables", "end", "limit", "num_bytes")

    def __init__(self, start: int, limit: int) -> None:
        """Creates a segment for positions in [start, limit)."""
        self.end = start
        """The end of the indexed positions."""
        self.limit = limit
        self.num_bytes = self.bytes_of(limit - start)
        self._num_slots = 2 * (limit - start) + 1  # one slot is always free
        self._tables = [array("i", [-1]) * self._num_slots for _ in NGRAM_SIZES]

    @staticmethod
    def bytes_of(num_positions: int) -> int:
        return (2 * num_positions + 1) * len(NGRAM_SIZES) * BYTES_PER_SLOT

    def extend(self, text: Sequence[int], end: int) -> None:
        """Indexes the positions before `end`, which is at most `limit`. The text must have a token at each of them."""
        for position in range(self.end, end):
            for size, table in zip(NGRAM_SIZES, self._tables):  # noqa: B905 as many; strict costs time here
                if size <= position:
                    table[self._slot(table, text, position, size)] = position
        self.end = max(self.end, end)

    def find(self, text: Sequence[int], place: int, size: int) -> int:
        """Returns the position after the latest known occurrence of the n-gram that ends the text, or -1.

        `place`: the index of `size` in `NGRAM_SIZES`.
        """
        table = self._tables[place]
        return table[self._slot(table, text, len(text), size)]

    def _slot(self, table: array[int], text: Sequence[int], end: int, size: int) -> int:
        """Returns the slot of the n-gram before `end`, or the free slot where the n-gram belongs."""
        ngram = text[end - size : end]
        slot = hash((_SEED, *ngram)) % self._num_slots
        while (position := table[slot]) >= 0 and text[position - size : position] != ngram:
            slot = slot + 1 if slot + 1 < self._num_slots else 0
        return slot


class NgramIndex:
    """The n-grams of one growing text, except those at its end. The first segment holds the prompt and may be shared.

    Adding a token and looking up take the same time however long the text is.
    """

    __slots__ = ("_last_token_id", "segments")

    def __init__(self, prompt: NgramSegment) -> None:
        self.segments = [prompt]
        self._last_token_id = -1

    def __len__(self) -> int:
        """The number of indexed tokens of the text."""
        return self.segments[-1].end

    def is_of(self, text: Sequence[int]) -> bool:
        """Returns whether the text may be the indexed one. It compares only the last indexed token."""
        size = len(self)
        return size <= len(text) and (self._last_token_id < 0 or text[size - 1] == self._last_token_id)

    def num_new_positions(self, end: int) -> int:
        """Returns the size of the segment that `extend` would add; 0, as in most steps, if it adds none."""
        num_missing = end - self.segments[-1].limit
        if num_missing <= 0:
            return 0
        usual: int = FIRST_SEGMENT_TOKENS * SEGMENT_GROWTH ** (len(self.segments) - 1)
        return max(num_missing, usual)

    def extend(self, text: Sequence[int], end: int) -> None:
        """Indexes the positions before `end`. The text must have a token at each of them."""
        last = self.segments[-1]
        if num_positions := self.num_new_positions(end):
            last.extend(text, last.limit)
            last = NgramSegment(last.limit, last.limit + num_positions)
            self.segments.append(last)
        last.extend(text, end)
        self._last_token_id = text[end - 1]

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Looks for the latest earlier occurrence of the longest n-gram that ends the text.

        Returns the position after this occurrence, and the match's grade; (0, 0) if there is none.
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

    It also runs in the decode node. Sequences with equal prompts, e.g. the samples of a request, share the prompt's
    part of the index. A sequence gets no drafts while there is no memory for its index.
    """

    def __init__(self, *, max_bytes: int = MAX_INDEX_BYTES) -> None:
        """`max_bytes`: limit of the memory of all indexes."""
        self.info = ProposerInfo(name="ngram", memory_bytes=max_bytes)
        self.num_wasted_tokens = 0
        self.num_bytes = 0
        self._indexes: dict[int, NgramIndex] = {}
        self._prompts: WeakValueDictionary[tuple[int, int], NgramSegment] = WeakValueDictionary()  # by length and hash

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, empty if no n-gram repeats. Nearly complete indexes grow first."""
        num_left = MAX_INDEXED_TOKENS
        found: dict[int, Proposal] = {}
        asked: list[tuple[int, ProposalRequest, NgramIndex]] = []  # int: number of tokens that are not indexed
        for request in requests:
            index = self._index(request)
            if index is None:
                found[request.sequence_id] = nothing(request)
            else:
                asked.append((len(request.token_ids) - len(index), request, index))
        for num_missing, request, index in sorted(asked, key=itemgetter(0)):
            text = request.token_ids
            start = len(index)  # another request may have indexed more of a shared prompt
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
        """Returns the sequence's index, or None if its prompt is not complete yet or there is no memory for it."""
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
