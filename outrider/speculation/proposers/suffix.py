"""Proposes what most often followed the text's ending, either in the text itself or in earlier outputs of the node.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). The confidence in a token is its share among all tokens
that followed; a draft ends where the product of these shares gets too small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count

from outrider.speculation.draft_stream import MAX_SIBLINGS
from outrider.speculation.draft_tree import ROOT, DraftTree, unless_chain
from outrider.speculation.proposers.base import (
    MAX_INDEX_BYTES,
    Progress,
    Proposal,
    ProposalRequest,
    ProposerInfo,
    nothing,
)

CONTEXT_SIZES = (16, 8, 4, 2)
"""Sizes of contexts, longest first. Single tokens predict too little, as for n-grams."""

MAX_INDEXED_TOKENS = 128
"""Maximum number of tokens that one call indexes, in some 0.6 ms. Long prompts take several calls."""

ONCE_MORE = 1 << 32
"""A number above every token id. `SuffixIndex` adds it to an id for each repetition."""

BYTES_PER_TOKEN = 512
"""Bytes of memory that each token of an indexed text takes: with it, one context of each size is stored."""

MAX_CHILDREN = 3
"""Maximum number of children of a token, if the sequence takes trees."""

MIN_CONFIDENCE = 0.2
"""A draft ends where the product of the shares on its path would fall below this number."""

_Followers = dict[int, int]  # token id -> count


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token that may follow, and its share among all tokens that followed."""

    token_id: int
    share: float  # (0, 1]
    context_size: int  # size of the context that the token followed, one of `CONTEXT_SIZES`


class SuffixIndex:
    """The tokens that followed each context of `CONTEXT_SIZES` tokens. Texts may grow and be removed. Not thread-safe.

    Frequencies are kept by hashed contexts of a few lengths, not in SuffixDecoding's suffix tree. So adding or removing
    a token takes the same time however long the texts are.
    """

    __slots__ = ("_followers",)

    def __init__(self) -> None:
        # A single follower, the usual case, is stored as its id plus ONCE_MORE for each repetition, because a
        # dictionary would be three times as large.
        self._followers: dict[int, int | _Followers] = {}

    def __len__(self) -> int:
        """The number of different contexts, to which memory is proportional."""
        return len(self._followers)

    def add(self, text: Sequence[int], start: int, end: int, *, salt: bytes = b"") -> None:
        """Counts each token of `text[start:end]` as a follower of the tokens before it, for texts of this salt only."""
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
        """Removes what `add` has counted with the same arguments."""
        followers = self._followers
        for key, token_id in self._contexts(text, start, end, salt):
            known = followers.get(key)
            # Two contexts may have the same key, so the removal of the other may have removed this count already.
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
        """Returns the followers of the longest known ending of `text`, at most `most`; none if no ending is known.

        They are sorted by falling frequency. Among equally frequent ones, the latest comes first.
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
        """Yields (key of a context, the token that followed it) for each token of `text[start:end]` and each size."""
        for place in range(start, end):
            for size in CONTEXT_SIZES:
                if size <= place:
                    yield _key(salt, text, place, size), text[place]


def _key(salt: bytes, text: Sequence[int], end: int, size: int) -> int:
    """Returns the key of a salt and the `size` tokens before `end`. A collision costs no more than a wrong draft."""
    return hash((salt, size, *text[end - size : end]))


@dataclass(slots=True)
class _Text:
    """The state of one sequence."""

    prompt_length: int
    salt: bytes
    is_remembered: bool
    index: SuffixIndex = field(default_factory=SuffixIndex)
    token_ids: Sequence[int] = ()  # the caller's list
    num_indexed: int = 0
    last_token_id: int = -1  # the last of the indexed tokens

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the text may be the indexed one. Compares only one token: an error costs only acceptance."""
        size = self.num_indexed
        return size <= len(token_ids) and (not size or token_ids[size - 1] == self.last_token_id)

    def extend(self, num_tokens: int) -> None:
        """Indexes `num_tokens` more tokens."""
        start, self.num_indexed = self.num_indexed, self.num_indexed + num_tokens
        self.index.add(self.token_ids, start, self.num_indexed)
        self.last_token_id = self.token_ids[self.num_indexed - 1]


class PastOutputs:
    """The newest outputs of finished sequences, with at most `max_tokens` tokens in all."""

    def __init__(self, *, max_tokens: int) -> None:
        self.index = SuffixIndex()
        self._max_tokens = max_tokens
        self._texts: deque[tuple[bytes, int, list[int]]] = deque()  # (salt, start of the output, tokens)
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], prompt_length: int, *, salt: bytes = b"") -> None:
        """Remembers an output, for texts of the same salt. The prompt's end is the context of the output's start."""
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
    """Proposes frequent continuations. It needs no model and works on any vocabulary. One thread owns it."""

    def __init__(
        self,
        *,
        remembered_tokens: int = 0,
        min_confidence: float = MIN_CONFIDENCE,
        max_bytes: int = MAX_INDEX_BYTES,
    ) -> None:
        """`remembered_tokens`: maximum number of tokens of past outputs; 0: each request learns only from itself.

        `max_bytes`: limit of the sequences' indexes. A sequence gets no drafts while there is no memory for its index.
        """
        self.info = ProposerInfo(name="suffix", memory_bytes=max_bytes + remembered_tokens * BYTES_PER_TOKEN)
        self.num_wasted_tokens = 0
        self._past = PastOutputs(max_tokens=remembered_tokens) if remembered_tokens else None
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._num_tokens = 0  # number of indexed tokens of all sequences
        self._min_confidence = min_confidence
        self._texts: dict[int, _Text] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, empty if no ending is known. Nearly complete indexes grow first."""
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
        """Frees a sequence's index, and remembers its output if configured. Does nothing if the sequence is unknown."""
        text = self._texts.pop(sequence_id, None)
        if text is None:
            return
        self._num_tokens -= text.num_indexed
        if self._past is not None and text.is_remembered:
            self._past.add(text.token_ids, text.prompt_length, salt=text.salt)

    def _tree(self, text: _Text, num_wanted: int, *, max_children: int) -> DraftTree:
        """Returns the likeliest continuations, at most `num_wanted` tokens deep, in the order of their probability.

        A token's probability is the product of the shares on its path. The draft ends where the product gets too small.
        """
        longest = max(CONTEXT_SIZES)
        token_ids: list[int] = []
        parents: list[int] = []
        # A heap of candidates: (-confidence, order, parent, the last tokens of the text including the candidate).
        waiting: list[tuple[float, int, int, list[int]]] = []
        order = count()

        def expand(parent: int, ending: list[int], confidence: float) -> int:
            """Adds the followers of `ending` to the heap. Returns the size of the longest known context, or 0."""
            found = self._followers(text, ending, max_children)
            for each in found:
                if confidence * each.share >= self._min_confidence:
                    ended = [*ending, each.token_id][-longest:]
                    heappush(waiting, (-confidence * each.share, next(order), parent, ended))
            return found[0].context_size if found else 0

        depths = [0]  # depth of the root, then of each token
        grade = expand(ROOT, list(text.token_ids[-longest:]), 1.0) if num_wanted > 0 else 0
        while waiting and len(token_ids) < num_wanted + MAX_SIBLINGS:
            negated, _, parent, ending = heappop(waiting)
            token_ids.append(ending[-1])
            parents.append(parent)
            depths.append(depths[parent + 1] + 1)
            if depths[-1] < num_wanted:
                expand(len(token_ids) - 1, ending, -negated)
        return DraftTree(
            len(text.token_ids), token_ids=tuple(token_ids), parents=unless_chain(tuple(parents)), grade=grade
        )

    def _followers(self, text: _Text, ending: Sequence[int], most: int) -> list[Prediction]:
        """Returns the followers in the text or those in past outputs, whichever begin with the larger share."""
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
            # Outputs of rejection sampling are not remembered: a repeated request would be proposed what the same
            # random words decided, which is a bias.
            is_remembered = start is None or not start.wants_distributions
            text = self._texts[request.sequence_id] = _Text(prompt_length, salt, is_remembered)
        text.token_ids = token_ids
        return text
