"""The blocks of a cache that is divided among ranks. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outrider.engine.kv_cache.block_pool import BlockPool


class DividedPool(BlockPool):
    """The pools of all ranks, each of which numbers its blocks after those of the rank before.

    A sequence has all its blocks in one of them, which `part_for` chooses, and blocks are allocated only there. Prompts
    with the same beginning share blocks within a rank.
    """

    def __init__(self, num_parts: int, *, num_blocks: int, **settings: Any) -> None:
        """`num_blocks`: the number of blocks of each part. `settings`: other arguments of BlockPool, for each part."""
        super().__init__(num_blocks=num_parts * num_blocks, **settings)
        self._free.clear()  # all blocks are the parts'
        self.num_blocks_together = num_blocks
        self.parts = tuple(
            BlockPool(first_block_id=part * num_blocks, num_blocks=num_blocks, **settings) for part in range(num_parts)
        )

    @property
    def num_free_blocks(self) -> int:
        return sum(part.num_free_blocks for part in self.parts)

    @property
    def free_by_group(self) -> tuple[int, ...]:
        """`num_free_blocks` of each part."""
        return tuple(part.num_free_blocks for part in self.parts)

    @property
    def num_free_in_scarcest(self) -> int:
        """The number of free blocks if every part had as many as the one with the most, where a sequence finds room."""
        return len(self.parts) * max(self.free_by_group)

    def as_reported(self, num_blocks: int) -> int:
        return min(num_blocks, self.num_blocks_together) * len(self.parts)

    def part_for(self, token_ids: Sequence[int], *, max_tokens: int, cache_salt: bytes = b"") -> BlockPool:
        """Returns the part that would have the most free blocks with this sequence, of which those count as free that
        are found in its prefix cache. If less than a quarter would be free, only what really is free counts.

        With equal loads, a sequence goes where its prefix is. But if all sequences have a prefix in common, they do not
        all go to the same rank.
        """
        chain, num_found, num_used = self.new_hashes(cache_salt), Counter[BlockPool](), Counter[BlockPool]()
        having = self.parts if self.enable_prefix_cache else ()
        for _ in range(min(max_tokens, len(token_ids)) // self.block_size):
            if not having:
                break
            block_hash = chain.append(token_ids)
            counts = {part: part.num_references(block_hash) for part in having}
            having = tuple(part for part in having if counts[part] >= 0)
            num_found.update(having)
            num_used.update(part for part in having if counts[part] > 0)
        needed = self.num_blocks_for(len(token_ids))

        def rank_of(part: BlockPool) -> tuple[int, int]:
            num_free = part.num_free_blocks
            num_left = num_free + num_used[part] - needed
            return min(num_left, self.num_blocks_together // 4), num_free + num_found[part]

        return max(self.parts, key=rank_of)
