"""Names a token prefix by its content: xxh3-64 over the ids as little-endian uint32.

Both ends of the draft stream key branches by (length, prefix hash), so that a proposal
needs no other bookkeeping to be found, re-based or thrown away.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import xxhash

HISTORY = 256


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Little-endian uint32 of each id. Raises OverflowError for an id outside uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prefix_hash(token_ids: Iterable[int]) -> int:
    """xxh3-64 of all of `token_ids`."""
    return xxhash.xxh3_64_intdigest(token_bytes(token_ids))


class HashedTokens:
    """A growing list of tokens that knows the hash of its recent prefixes.

    Keeps the hashes of the last `history` lengths; each new token costs one small update
    of the running hash. Not thread-safe: confined to its owner.
    """

    __slots__ = ("_hasher", "_hashes", "_token_ids")

    def __init__(self, token_ids: Sequence[int] = (), *, history: int = HISTORY) -> None:
        self._token_ids: list[int] = []
        self._hasher = xxhash.xxh3_64()
        self._hashes: deque[int] = deque((self._hasher.intdigest(),), maxlen=history)
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens themselves; not to be changed by the reader."""
        return self._token_ids

    @property
    def hash(self) -> int:
        """Hash of all tokens."""
        return self._hashes[-1]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends. Raises OverflowError for an id outside uint32, and changes nothing then."""
        payload = token_bytes(token_ids)
        history = self._hashes.maxlen or HISTORY
        in_bulk = max(0, len(token_ids) - history)
        if in_bulk:
            self._hasher.update(payload[: 4 * in_bulk])
        update, digest, note = self._hasher.update, self._hasher.intdigest, self._hashes.append
        for start in range(4 * in_bulk, len(payload), 4):
            update(payload[start : start + 4])
            note(digest())
        self._token_ids.extend(token_ids)

    def hash_after(self, token_ids: Sequence[int]) -> int:
        """Hash of all tokens and these after them. Raises OverflowError for an id outside uint32."""
        hasher = self._hasher.copy()
        hasher.update(token_bytes(token_ids))
        return hasher.intdigest()

    def hash_at(self, length: int) -> int:
        """Hash of the first `length` tokens; cheap for the last `history` lengths.

        Raises ValueError when there are fewer tokens than that.
        """
        age = len(self._token_ids) - length
        if age == 0:
            return self._hashes[-1]
        if age < 0 or length < 0:
            raise ValueError(f"no prefix of {length} among {len(self._token_ids)} tokens")
        if age < len(self._hashes):
            return self._hashes[-1 - age]
        return prefix_hash(self._token_ids[:length])
