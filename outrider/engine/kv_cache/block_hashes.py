"""Content names of full blocks: SHA-256 chained over (parent, token ids), as in vLLM v1."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_ROOT_TAG = b"outrider.kv-block.1"


class BlockHashes:
    """The chain of one token sequence: entry i names the KV of tokens [0, (i + 1) * block_size).

    Two equal names mean equal tokens from position 0 on: SHA-256, because a collision
    would serve another user's KV. The seed (the model fingerprint, of one length) keeps models
    apart, the salt tenants.
    Grows block by block: the cost of a step does not grow with its sequence.
    """

    __slots__ = ("_block_size", "_hashes", "_layout", "_root")

    def __init__(self, *, hash_seed: bytes, block_size: int, cache_salt: bytes = b"") -> None:
        self._block_size = block_size
        self._layout = struct.Struct(f"<{block_size}I")  # token ids, little-endian uint32
        self._root = hashlib.sha256(_ROOT_TAG + block_size.to_bytes(4, "little") + hash_seed + cache_salt).digest()
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self._hashes)

    def append(self, token_ids: Sequence[int]) -> bytes:
        """The next block's name. `token_ids` is the whole sequence from position 0; only that block of it is read."""
        start = len(self._hashes) * self._block_size
        parent = self._hashes[-1] if self._hashes else self._root
        packed = self._layout.pack(*token_ids[start : start + self._block_size])
        block_hash = hashlib.sha256(parent + packed).digest()
        self._hashes.append(block_hash)
        return block_hash

    def truncate(self, num_blocks: int) -> None:
        """Keeps the first `num_blocks` names."""
        if num_blocks < len(self._hashes):
            del self._hashes[num_blocks:]

    def copy(self) -> BlockHashes:
        """A chain of its own with the same content."""
        other = object.__new__(BlockHashes)
        other._block_size, other._layout, other._root = self._block_size, self._layout, self._root
        other._hashes = self._hashes.copy()
        return other
