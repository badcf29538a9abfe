"""The hash that identifies a token prefix: xxh3-64 over the ids as little-endian uint32.

Both ends of the draft stream key branches by (length, prefix hash), so a proposal can be found, shortened or
dropped without other bookkeeping.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import xxhash

HISTORY = 256
"""Default number of recent prefix lengths whose hashes are cheap to get."""


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Returns the ids as uint32 in native byte order, i.e. little-endian. Raises: OverflowError if one does not fit."""
    return array("I", token_ids).tobytes()


def prefix_hash(token_ids: Iterable[int]) -> int:
    """Returns the xxh3-64 of all of `token_ids`."""
    return xxhash.xxh3_64_intdigest(token_bytes(token_ids))


class HashedTokens:
    """A growing list of tokens with the hashes of its recent prefixes.

    The hash of all tokens is kept up to date. Hashes of the last `history` lengths are computed on demand, since most
    texts grow by several tokens at once and the lengths in between are rarely needed. Not thread-safe.
    """

    __slots__ = ("_behind", "_hasher", "_hashes", "_history", "_num_behind", "hash", "token_ids")

    def __init__(self, token_ids: Sequence[int] = (), *, history: int = HISTORY) -> None:
        self.token_ids: list[int] = []
        """The tokens; readers must not change them."""
        self._history = history
        self._hasher = xxhash.xxh3_64()
        self.hash = self._hasher.intdigest()
        """Hash of all tokens."""
        num_old = max(0, len(token_ids) - history)
        self.extend(token_ids[:num_old])
        self._behind = self._hasher.copy()  # the hasher after `_num_behind` tokens, the longest prefix in `_hashes`
        self._num_behind = num_old
        self._hashes: deque[int] = deque((self.hash,), maxlen=history)
        self.extend(token_ids[num_old:])

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. Raises: OverflowError for an id outside uint32; the list is then unchanged."""
        self._hasher.update(token_bytes(token_ids))
        self.hash = self._hasher.intdigest()
        self.token_ids.extend(token_ids)

    def hash_after(self, token_ids: Sequence[int]) -> int:
        """Returns the hash of all tokens followed by these. Raises: OverflowError for an id outside uint32."""
        hasher = self._hasher.copy()
        hasher.update(token_bytes(token_ids))
        return hasher.intdigest()

    def hash_at(self, length: int) -> int:
        """Returns the hash of the first `length` tokens; cheap for the last `history` lengths.

        Raises: ValueError if there are fewer tokens than that.
        """
        age = len(self.token_ids) - length
        if age == 0:
            return self.hash
        if age < 0 or length < 0:
            raise ValueError(f"there is no prefix of {length} tokens: the text has {len(self.token_ids)}")
        if age >= self._history:
            return prefix_hash(self.token_ids[:length])
        if length > self._num_behind:
            self._catch_up()
        return self._hashes[length - self._num_behind - 1]

    def _catch_up(self) -> None:
        """Computes hashes of the lengths since the last call; hashes each token at most once."""
        payload = token_bytes(self.token_ids[self._num_behind :])
        in_bulk = max(0, len(payload) - 4 * self._history)
        if in_bulk:
            self._behind.update(payload[:in_bulk])
        update, digest, note = self._behind.update, self._behind.intdigest, self._hashes.append
        for start in range(in_bulk, len(payload), 4):
            update(payload[start : start + 4])
            note(digest())
        self._num_behind = len(self.token_ids)
