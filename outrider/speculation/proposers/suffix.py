"""Proposes what most often followed the text's ending: in the text itself, and in what the node generated before.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). The share of a continuation among all that were
seen is its confidence: a draft ends where it becomes unlikely that so much of it is accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from outrider.speculation.draft_stream import MAX_SIBLINGS
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.proposers.base import (
    MAX_INDEXED_TOKENS,
    LookupProposer,
    Proposal,
    ProposalRequest,
    catching_up,
)
from outrider.speculation.suffix_index import CONTEXT_SIZES, Prediction, SuffixIndex

MAX_CHILDREN = 3
"""Of a token, where the target takes trees."""

MIN_CONFIDENCE = 0.2
"""A draft ends before the token with which the shares' product falls below this."""


@dataclass(slots=True)
class _Text:
    """One sequence."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    token_ids: list[int] = field(default_factory=list)
    prompt_length: int = 0
    salt: bytes = b""

    def follow(self, token_ids: Sequence[int], *, most: int) -> int:
        """Learns at most so many new tokens; how many there were."""
        start = len(self.token_ids)
        self.token_ids += token_ids[start : start + most]
        self.index.add(self.token_ids, start, len(self.token_ids))
        return len(self.token_ids) - start


class PastOutputs:
    """What finished sequences have generated: at most `max_tokens` tokens of it, the oldest give way."""

    def __init__(self, *, max_tokens: int) -> None:
        self.index = SuffixIndex()
        self._max_tokens = max_tokens
        self._texts: deque[tuple[bytes, int, list[int]]] = deque()  # (salt, where the output begins, tokens)
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], prompt_length: int, *, salt: bytes = b"") -> None:
        """Remembers what follows the prompt, for texts of the same salt; its end is the context of the first of it."""
        first = max(prompt_length, len(token_ids) - self._max_tokens)
        context = max(0, first - max(CONTEXT_SIZES))
        text = list(token_ids[context:])
        start = first - context
        if len(text) <= start:
            return
        self.index.add(text, start, len(text), salt=salt)
        self._texts.append((salt, start, text))
        self.num_tokens += len(text) - start
        while self.num_tokens > self._max_tokens:
            salt, start, text = self._texts.popleft()
            self.index.remove(text, start, len(text), salt=salt)
            self.num_tokens -= len(text) - start


class SuffixProposer(LookupProposer):
    """Needs no model and works on any vocabulary. Not thread-safe: one owner."""

    def __init__(self, *, remembered_tokens: int = 0, min_confidence: float = MIN_CONFIDENCE) -> None:
        """`remembered_tokens`: of past outputs, about 300 bytes each; 0: each request learns from itself only."""
        self._past = PastOutputs(max_tokens=remembered_tokens) if remembered_tokens else None
        self._min_confidence = min_confidence
        self._texts: dict[int, _Text] = {}

    @property
    def name(self) -> str:
        return "suffix"

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where no ending is known."""
        found: list[Proposal] = []
        num_left = MAX_INDEXED_TOKENS
        for request in requests:
            text = self._text(request)
            num_left -= text.follow(request.token_ids, most=num_left)
            num_known, length = len(text.token_ids), len(request.token_ids)
            if num_known < length:
                found.append(catching_up(request, num_known))
                continue
            if request.start is not None and request.start.takes_siblings:
                tree = self._tree(text, request.num_wanted)
            else:
                tree = DraftTree(length, token_ids=self._continuation(text, request.num_wanted))
            found.append(Proposal(sequence_id=request.sequence_id, tree=tree))
        return found

    def forget(self, sequence_id: int) -> None:
        """Frees a sequence's index, and remembers its output if so configured; an unknown one is fine."""
        text = self._texts.pop(sequence_id, None)
        if text is not None and self._past is not None:
            self._past.add(text.token_ids, text.prompt_length, salt=text.salt)

    def _continuation(self, text: _Text, num_wanted: int) -> tuple[int, ...]:
        longest = max(CONTEXT_SIZES)
        ending = text.token_ids[-longest:]
        found: list[int] = []
        confidence = 1.0
        while len(found) < num_wanted:
            own = text.index.predict(ending)
            past = self._past.index.predict(ending, salt=text.salt) if self._past is not None else None
            best = max((each for each in (own, past) if each), key=lambda each: each.share, default=None)
            if best is None or confidence * best.share < self._min_confidence:
                break
            confidence *= best.share
            found.append(best.token_id)
            ending = [*ending, best.token_id][-longest:]
        return tuple(found)

    def _tree(self, text: _Text, num_wanted: int) -> DraftTree:
        """The likeliest continuations, at most `num_wanted` tokens deep: each token by falling product of shares."""
        longest = max(CONTEXT_SIZES)
        token_ids: list[int] = []
        parents: list[int] = []
        waiting: list[tuple[float, int, int, list[int]]] = []  # -confidence, order, parent, ending with the token
        order = count()

        def expand(parent: int, ending: list[int], confidence: float) -> None:
            for each in self._followers(text, ending):
                if confidence * each.share >= self._min_confidence:
                    ended = [*ending, each.token_id][-longest:]
                    heappush(waiting, (-confidence * each.share, next(order), parent, ended))

        depths = [0]  # of the root, then of each token
        if num_wanted > 0:
            expand(ROOT, text.token_ids[-longest:], 1.0)
        while waiting and len(token_ids) < num_wanted + MAX_SIBLINGS:
            negated, _, parent, ending = heappop(waiting)
            token_ids.append(ending[-1])
            parents.append(parent)
            depths.append(depths[parent + 1] + 1)
            if depths[-1] < num_wanted:
                expand(len(token_ids) - 1, ending, -negated)
        is_chain = parents == list(range(ROOT, len(parents) - 1))
        return DraftTree(len(text.token_ids), token_ids=tuple(token_ids), parents=() if is_chain else tuple(parents))

    def _followers(self, text: _Text, ending: Sequence[int]) -> list[Prediction]:
        """From the text or from past outputs, whichever is surer of its first."""
        own = text.index.followers(ending, most=MAX_CHILDREN)
        past = self._past.index.followers(ending, most=MAX_CHILDREN, salt=text.salt) if self._past is not None else []
        return max(own, past, key=lambda found: found[0].share if found else 0.0)

    def _text(self, request: ProposalRequest) -> _Text:
        token_ids = request.token_ids
        text = self._texts.get(request.sequence_id)
        # Looks at the newest token only: another text costs acceptance, never correctness.
        size = 0 if text is None else len(text.token_ids)
        if text is None or size > len(token_ids) or (size and text.token_ids[-1] != token_ids[size - 1]):
            prompt_length = len(token_ids) if request.start is None else request.start.prompt_length
            salt = b"" if request.start is None else request.start.cache_salt
            text = self._texts[request.sequence_id] = _Text(prompt_length=prompt_length, salt=salt)
        return text
