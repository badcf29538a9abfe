"""Makes the pool of a cache's blocks. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.engine.kv_cache.block_pool import BlockPool, StatePool, WindowPool
from outrider.engine.kv_cache.planes import LayerGroup


class CacheSize(Protocol):
    """The sizes of a KV cache, in one process or divided among ranks."""

    num_blocks: int
    block_size: int
    window_blocks: tuple[int, ...]
    state_slots: int
    layer_groups: tuple[LayerGroup, ...]


def make_pool(kv_cache: CacheSize, *, max_step_tokens: int, **shared: Any) -> BlockPool:
    """Makes a pool of the cache's blocks, with one for each sliding window and one for states. `shared`: what all pools
    have in common, except for the block size (see BlockPool). `max_step_tokens`: see WindowPool.
    """
    shared["block_size"] = kv_cache.block_size
    windows: list[WindowPool | StatePool] = []
    first_block = kv_cache.num_blocks
    for group, num_blocks in zip(kv_cache.layer_groups[1:], kv_cache.window_blocks, strict=True):
        windows.append(
            WindowPool(
                window=group.window,
                max_step_tokens=max_step_tokens,
                first_block=first_block,
                num_blocks=num_blocks,
                **shared,
            )
        )
        first_block += num_blocks
    if kv_cache.layer_groups[-1].has_states:
        windows.append(StatePool(num_blocks=kv_cache.state_slots, **shared))
    return BlockPool(num_blocks=kv_cache.num_blocks, windows=windows, **shared)
