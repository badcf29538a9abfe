"""Remembers which prefixes of prompts each node has computed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

PREFIX_CHUNK_TOKENS = 32
MAX_PREFIX_CHUNKS = 131_072
"""Maximum chunks remembered for all nodes together: 4 million prompt tokens."""


class PrefixMap:
    """A bounded LRU map of the prompt prefixes that each node has computed."""

    def __init__(self, max_chunks: int = MAX_PREFIX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._nodes: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # (prefix hash, node's incarnation)

    def num_held_tokens(self, prefix_hashes: Sequence[int], incarnation: bytes) -> int:
        """Returns the number of leading prompt tokens that the node probably has in its prefix cache."""
        num_chunks = 0
        for prefix_hash in prefix_hashes:
            if (prefix_hash, incarnation) not in self._nodes:
                break
            num_chunks += 1
        return num_chunks * PREFIX_CHUNK_TOKENS

    def remember(self, prefix_hashes: Sequence[int], incarnation: bytes) -> None:
        for prefix_hash in prefix_hashes:
            self._nodes[prefix_hash, incarnation] = None
            self._nodes.move_to_end((prefix_hash, incarnation))
        while len(self._nodes) > self._max_chunks:
            self._nodes.popitem(last=False)


def prefix_hashes(token_ids: Sequence[int], *, salt: bytes = b"") -> list[int]:
    """Returns a hash of each prefix made of whole chunks. The last token is left out, because it is always computed."""
    hasher = xxhash.xxh3_64(salt)
    hashes = []
    for start in range(0, len(token_ids) - PREFIX_CHUNK_TOKENS, PREFIX_CHUNK_TOKENS):
        hasher.update(array("I", token_ids[start : start + PREFIX_CHUNK_TOKENS]).tobytes())
        hashes.append(hasher.intdigest())
    return hashes
