"""The features of one sequence's tokens, as its decode node has sent them."""

from __future__ import annotations

import numpy as np

from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.node import FeatureFormat


class HeldFeatures:
    """Features of a sequence's first tokens, without a gap: the `Features` of a ProposalRequest. Not thread-safe."""

    __slots__ = ("_data", "_format")

    def __init__(self, features: FeatureFormat) -> None:
        self._format = features
        self._data = bytearray()

    def __len__(self) -> int:
        """Tokens."""
        return len(self._data) // self._format.bytes_per_token

    def extend(self, start: int, payload: bytes) -> None:
        """Whole features of the tokens from `start` on, which is at most `len(self)`; what is held stays as it is."""
        assert start <= len(self), "no gap"
        self._data += memoryview(payload)[len(self._data) - start * self._format.bytes_per_token :]

    def read(self, start: int, end: int) -> Words:
        """Those of tokens [start, end): a copy, [end - start, width] of the format's dtype (see WORDS)."""
        size = self._format.bytes_per_token
        rows = np.frombuffer(self._data[start * size : end * size], dtype=WORDS[self._format.dtype])
        return rows.reshape(-1, self._format.width)
