"""Counts what followed the endings of texts: the longest known ending predicts the next token, with a confidence.

Source: the frequencies of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), kept by hashed contexts of a few
lengths instead of a suffix tree: adding and removing a token cost the same however long the texts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

CONTEXT_SIZES = (16, 8, 4, 2)
"""Longest first. Single tokens mean too little, as for n-grams."""

ONCE_MORE = 1 << 32
"""Above every token id."""

_Followers = dict[int, int]  # by token id: how often


@dataclass(frozen=True, slots=True)
class Prediction:
    """What follows, and its share of all that followed."""

    token_id: int
    share: float  # (0, 1]
    context_size: int  # of `CONTEXT_SIZES`: what it followed


class SuffixIndex:
    """What followed each context of `CONTEXT_SIZES` tokens. Texts may grow, and be removed again. One owner."""

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
