"""Content hashes of full blocks: SHA-256 chained over (parent, token ids), as in vLLM v1."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_ROOT_TAG = b"outrider.kv-block.1"


class BlockHashes:
    """The hash chain of one token sequence: entry i identifies the KV of tokens [0, (i + 1) * block_size).

    Equal hashes mean equal tokens from position 0 on. The hash is SHA-256 because a collision would serve another
    user's KV. The seed (the model fingerprint, of fixed length) separates models, and the salt separates tenants.

    The chain grows block by block, so the cost of a step does not grow with the sequence's length.
    """

    __slots__ = ("_block_size", "_hashes", "_layout", "_root")

    def __init__(self, *, hash_seed: bytes, block_size: int, cache_salt: bytes = b"") -> None:
        self._block_size = block_size
        self._layout = struct.Struct(f"<{block_size}I")  # token ids, little-endian uint32
        self._root = hashlib.sha256(_ROOT_TAG + block_size.to_bytes(4, "little") + hash_seed + cache_salt).digest()
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, blocks: slice) -> list[bytes]:
        """Returns the hashes of some of the blocks."""
        return self._hashes[blocks]

    def append(self, token_ids: Sequence[int]) -> bytes:
        """Appends and returns the next block's hash. `token_ids`: the whole sequence; only the block is read."""
        start = len(self._hashes) * self._block_size
        parent = self._hashes[-1] if self._hashes else self._root
        packed = self._layout.pack(*token_ids[start : start + self._block_size])
        block_hash = hashlib.sha256(parent + packed).digest()
        self._hashes.append(block_hash)
        return block_hash

    def truncate(self, num_blocks: int) -> None:
        """Drops all hashes after the first `num_blocks`."""
        if num_blocks < len(self._hashes):
            del self._hashes[num_blocks:]

    def copy(self) -> BlockHashes:
        """Returns an independent chain with the same content."""
        other = object.__new__(BlockHashes)
        other._block_size, other._layout, other._root = self._block_size, self._layout, self._root
        other._hashes = self._hashes.copy()
        return other
