"""Proposes what most often followed the text's ending: in the text itself, and in what the node generated before.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). The share of a continuation among all that were
seen is its confidence: a draft ends where it becomes unlikely that so much of it is accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count

from outrider.speculation.draft_stream import MAX_SIBLINGS
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.proposers.base import (
    MAX_INDEX_BYTES,
    MAX_INDEXED_TOKENS,
    Progress,
    Proposal,
    ProposalRequest,
    ProposerInfo,
    nothing,
)

CONTEXT_SIZES = (16, 8, 4, 2)
"""Longest first. Single tokens mean too little, as for n-grams."""

ONCE_MORE = 1 << 32
"""Above every token id."""

BYTES_PER_TOKEN = 512
"""Of an indexed text: a context of each size, with its follower."""

MAX_CHILDREN = 3
"""Of a token, where the target takes trees."""

MIN_CONFIDENCE = 0.2
"""A draft ends before the token with which the shares' product falls below this."""

_Followers = dict[int, int]  # by token id: how often


@dataclass(frozen=True, slots=True)
class Prediction:
    """What follows, and its share of all that followed."""

    token_id: int
    share: float  # (0, 1]
    context_size: int  # of `CONTEXT_SIZES`: what it followed


class SuffixIndex:
    """What followed each context of `CONTEXT_SIZES` tokens. Texts may grow, and be removed again. One owner.

    The frequencies of SuffixDecoding, kept by hashed contexts of a few lengths instead of a suffix tree: adding and
    removing a token cost the same however long the texts are.
    """

    __slots__ = ("_followers",)

    def __init__(self) -> None:
        # One follower, the usual case, is its id, plus ONCE_MORE for each further time: a dictionary would be three
        # times as large.
        self._followers: dict[int, int | _Followers] = {}

    def __len__(self) -> int:
        """Number of different contexts; memory is proportional to it."""
        return len(self._followers)

    def add(self, text: Sequence[int], start: int, end: int, *, salt: bytes = b"") -> None:
        """Counts that each token of `text[start:end]` followed the tokens before it; seen under the same salt only."""
        followers = self._followers
        for key, token_id in self._contexts(text, start, end, salt):
            known = followers.get(key)
            if known is None:
                followers[key] = token_id
            elif isinstance(known, dict):
                known[token_id] = known.get(token_id, 0) + 1
            elif known % ONCE_MORE == token_id:
                followers[key] = known + ONCE_MORE
            else:
                followers[key] = {known % ONCE_MORE: known // ONCE_MORE + 1, token_id: 1}

    def remove(self, text: Sequence[int], start: int, end: int, *, salt: bytes = b"") -> None:
        """Takes back what `add` has counted with the same arguments."""
        followers = self._followers
        for key, token_id in self._contexts(text, start, end, salt):
            known = followers.get(key)
            # Where contexts share a key, another one may have taken it.
            if isinstance(known, dict):
                if known.get(token_id, 0) > 1:
                    known[token_id] -= 1
                else:
                    known.pop(token_id, None)
                if not known:
                    del followers[key]
            elif known is not None and known % ONCE_MORE == token_id:
                if known < ONCE_MORE:
                    del followers[key]
                else:
                    followers[key] = known - ONCE_MORE

    def followers(self, text: Sequence[int], *, most: int, salt: bytes = b"") -> list[Prediction]:
        """What followed the longest known ending of `text`, the most frequent first, of equal counts the latest.

        At most so many; empty when nothing is known.
        """
        for size in CONTEXT_SIZES:
            if size > len(text):
                continue
            known = self._followers.get(_key(salt, text, len(text), size))
            if isinstance(known, dict):
                num_all = sum(known.values())
                best = nlargest(most, reversed(known), key=known.__getitem__)
                return [Prediction(token_id, known[token_id] / num_all, size) for token_id in best]
            if known is not None:
                return [Prediction(known % ONCE_MORE, 1.0, size)]
        return []

    def _contexts(self, text: Sequence[int], start: int, end: int, salt: bytes) -> Iterator[tuple[int, int]]:
        """(key of a context, the token that followed it) for each token of `text[start:end]` and each size."""
        for place in range(start, end):
            for size in CONTEXT_SIZES:
                if size <= place:
                    yield _key(salt, text, place, size), text[place]


def _key(salt: bytes, text: Sequence[int], end: int, size: int) -> int:
    """Of a salt and the `size` tokens before `end`. Contexts may share one by accident: a wrong guess, nothing more."""
    return hash((salt, size, *text[end - size : end]))


@dataclass(slots=True)
class _Text:
    """One sequence."""

    prompt_length: int
    salt: bytes
    is_remembered: bool
    index: SuffixIndex = field(default_factory=SuffixIndex)
    token_ids: Sequence[int] = ()  # the caller's
    num_indexed: int = 0
    last_token_id: int = -1  # of those

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        """Looks at one token only: another text costs acceptance, never correctness."""
        size = self.num_indexed
        return size <= len(token_ids) and (not size or token_ids[size - 1] == self.last_token_id)

    def extend(self, num_tokens: int) -> None:
        """Indexes so many tokens more."""
        start, self.num_indexed = self.num_indexed, self.num_indexed + num_tokens
        self.index.add(self.token_ids, start, self.num_indexed)
        self.last_token_id = self.token_ids[self.num_indexed - 1]


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


class SuffixProposer:
    """Needs no model and works on any vocabulary. Not thread-safe: one owner."""

    def __init__(
        self,
        *,
        remembered_tokens: int = 0,
        min_confidence: float = MIN_CONFIDENCE,
        max_bytes: int = MAX_INDEX_BYTES,
    ) -> None:
        """`remembered_tokens`: of past outputs; 0: each request learns from itself only.

        `max_bytes`: of the indexes of sequences. Those for which there is no memory get no drafts until there is.
        """
        self.info = ProposerInfo(name="suffix", memory_bytes=max_bytes + remembered_tokens * BYTES_PER_TOKEN)
        self.num_wasted_tokens = 0
        self._past = PastOutputs(max_tokens=remembered_tokens) if remembered_tokens else None
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._num_tokens = 0  # indexed, of all sequences
        self._min_confidence = min_confidence
        self._texts: dict[int, _Text] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where no ending is known. What lacks least is indexed first."""
        found: dict[int, Proposal] = {}
        num_left = MAX_INDEXED_TOKENS
        texts = [(request, self._text(request)) for request in requests]
        for request, text in sorted(texts, key=lambda each: len(each[0].token_ids) - each[1].num_indexed):
            num_missing = len(request.token_ids) - text.num_indexed
            num_new = min(num_missing, num_left, self._max_tokens - self._num_tokens)
            if num_new:
                text.extend(num_new)
                num_left -= num_new
                self._num_tokens += num_new
            if num_new < num_missing:
                progress = Progress.DONE if self._num_tokens >= self._max_tokens else Progress.CATCHING_UP
                found[request.sequence_id] = nothing(request, progress, num_behind=num_missing - num_new)
                continue
            takes_siblings = request.start is not None and request.start.takes_siblings
            tree = self._tree(text, request.num_wanted, max_children=MAX_CHILDREN if takes_siblings else 1)
            found[request.sequence_id] = Proposal(sequence_id=request.sequence_id, tree=tree)
        return [found[request.sequence_id] for request in requests]

    def forget(self, sequence_id: int) -> None:
        """Frees a sequence's index, and remembers its output if so configured; an unknown one is fine."""
        text = self._texts.pop(sequence_id, None)
        if text is None:
            return
        self._num_tokens -= text.num_indexed
        if self._past is not None and text.is_remembered:
            self._past.add(text.token_ids, text.prompt_length, salt=text.salt)

    def _tree(self, text: _Text, num_wanted: int, *, max_children: int) -> DraftTree:
        """The likeliest continuations, at most `num_wanted` tokens deep, in the order of their probability.

        A token's probability is the product of the shares on its path; a draft ends where it gets too small.
        """
        longest = max(CONTEXT_SIZES)
        token_ids: list[int] = []
        parents: list[int] = []
        waiting: list[tuple[float, int, int, list[int]]] = []  # -confidence, order, parent, ending with the token
        order = count()

        def expand(parent: int, ending: list[int], confidence: float) -> int:
            """Returns how many tokens the longest known ending has; 0: none is known."""
            found = self._followers(text, ending, max_children)
            for each in found:
                if confidence * each.share >= self._min_confidence:
                    ended = [*ending, each.token_id][-longest:]
                    heappush(waiting, (-confidence * each.share, next(order), parent, ended))
            return found[0].context_size if found else 0

        depths = [0]  # of the root, then of each token
        grade = expand(ROOT, list(text.token_ids[-longest:]), 1.0) if num_wanted > 0 else 0
        while waiting and len(token_ids) < num_wanted + MAX_SIBLINGS:
            negated, _, parent, ending = heappop(waiting)
            token_ids.append(ending[-1])
            parents.append(parent)
            depths.append(depths[parent + 1] + 1)
            if depths[-1] < num_wanted:
                expand(len(token_ids) - 1, ending, -negated)
        is_chain = parents == list(range(ROOT, len(parents) - 1))
        return DraftTree(
            len(text.token_ids),
            token_ids=tuple(token_ids),
            parents=() if is_chain else tuple(parents),
            grade=grade,
        )

    def _followers(self, text: _Text, ending: Sequence[int], most: int) -> list[Prediction]:
        """From the text or from past outputs, whichever is more confident of its first."""
        own = text.index.followers(ending, most=most)
        past = self._past.index.followers(ending, most=most, salt=text.salt) if self._past is not None else []
        return max(own, past, key=lambda found: found[0].share if found else 0.0)

    def _text(self, request: ProposalRequest) -> _Text:
        token_ids, start = request.token_ids, request.start
        text = self._texts.get(request.sequence_id)
        if text is None or not text.is_continued_by(token_ids):
            if text is not None:
                self._num_tokens -= text.num_indexed
            prompt_length = len(token_ids) if start is None else start.prompt_length
            salt = b"" if start is None else start.options.cache_salt
            # A repeated request would be offered what rejection sampling decided with the same luck: biased.
            is_remembered = start is None or not start.wants_distributions
            text = self._texts[request.sequence_id] = _Text(prompt_length, salt, is_remembered)
        text.token_ids = token_ids
        return text
