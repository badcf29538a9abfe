"""Recognises growing texts by their content, for engines whose sequences have no ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

MAX_GROWTH = 64
"""Maximum number of tokens by which a text may grow between two calls. A text that has grown by more is a new one."""

TokenIds = npt.NDArray[np.uint32]
_End = tuple[int, int]  # a text's length and its last token id


@dataclass(slots=True, eq=False)
class KnownText:
    """A text as it was seen last."""

    sequence_id: int
    end: _End
    hash: int  # of the whole text
    seen_at: float  # clock seconds

    @property
    def length(self) -> int:
        return self.end[0]


class KnownTexts:
    """Texts by length, last id and hash. Equal texts are one, since the same drafts serve them. Not thread-safe.

    Looking up a text compares ends first, so it hashes the text about once.
    """

    def __init__(self) -> None:
        self._by_end: dict[_End, dict[int, KnownText]] = {}

    def __iter__(self) -> Iterator[KnownText]:
        return (text for texts in self._by_end.values() for text in texts.values())

    def find(self, token_ids: TokenIds) -> KnownText | None:
        """Returns the longest known text that `token_ids`, which are not empty, begin with; None if there is none."""
        length = len(token_ids)
        for num_new, last_id in enumerate(token_ids[: -MAX_GROWTH - 2 : -1].tolist()):
            texts = self._by_end.get((length - num_new, last_id))
            known = texts and texts.get(_hash(token_ids[: length - num_new]))
            if known:
                return known
        return None

    def put(self, known: KnownText, token_ids: TokenIds) -> None:
        """Adds a text, or records that it has grown to `token_ids`."""
        self.remove(known)
        known.end, known.hash = (len(token_ids), int(token_ids[-1])), _hash(token_ids)
        self._by_end.setdefault(known.end, {})[known.hash] = known

    def remove(self, known: KnownText) -> None:
        """Removes a text, if it is there."""
        texts = self._by_end.get(known.end, {})
        if texts.get(known.hash) is known:
            del texts[known.hash]
            if not texts:
                del self._by_end[known.end]


def _hash(token_ids: TokenIds) -> int:
    return xxhash.xxh3_64_intdigest(token_ids.data)
