"""Opens the main memory for evicted blocks, and measures its first prices. Torch-free on a CPU."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

import numpy as np

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_copies import BlockCopies, block_bytes
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.host_store import HostStore
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.memory import free_main_memory_bytes
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.runner_base import ModelRunner

NUM_PROBES = 3


def open_host_store(cache: KVCache, runner: ModelRunner, num_bytes: int, *, max_rows: int) -> HostStore:
    """Makes a store of `num_bytes` for a cache whose blocks are all free, and measures its first prices.

    `max_rows`: the rows of a full step of prompts, which fit into a sequence.

    Raises: ConfigError if the model has linear attention, or if that much main memory is not free, besides the cache's
    own if that is in main memory.
    """
    if cache.layer_groups[-1].has_states:
        raise ConfigError("kv_cache.host_memory does not go with linear attention, whose states are not moved")
    on_cpu = cache.device == "cpu"
    num_blocks = (cache.num_blocks, *cache.window_blocks)
    cache_bytes = sum(num * size for num, size in zip(num_blocks, block_bytes(cache), strict=True))
    free = free_main_memory_bytes() - (cache_bytes if on_cpu else 0)
    if num_bytes > free:
        besides = f" besides {cache_bytes:,} of kv_cache.memory" if on_cpu else ""
        raise ConfigError(
            f"kv_cache.host_memory is {num_bytes:,} bytes, but only {max(free, 0):,} bytes of main memory are "
            f"free{besides}: set it lower"
        )
    price = CopyPrice(block_size=cache.block_size, num_groups=len(cache.layer_groups), max_rows=max_rows)
    if isinstance(cache, PagedKVCache) and cache.copies is not None:
        from outrider.engine.kv_cache.device_copies import DeviceBlockCopies  # imports torch

        copies: BlockCopies = DeviceBlockCopies(cache, num_bytes, price)
    else:
        copies = BlockCopies(cache, num_bytes, price)
    probe(cache, runner, copies, price, max_rows)
    return HostStore(copies, price)


def probe(cache: KVCache, runner: ModelRunner, copies: BlockCopies, price: CopyPrice, num_rows: int) -> None:
    """Measures copies of a block a few times, and a step of prompts. It writes to the first blocks."""
    for _ in range(NUM_PROBES):
        for group in range(len(cache.layer_groups)):
            copies.measure(group, 0)
    copies.finish()
    num_rows = min(num_rows, min([cache.num_blocks, *cache.window_blocks]) * cache.block_size)
    blocks = array("i", range(-(-num_rows // cache.block_size)))
    rows = SequenceRows([0] * num_rows, 0, blocks, num_logits=1, window_tables=[blocks] * len(cache.window_blocks))
    for is_warm in (False, True):
        started = time.perf_counter()
        runner.forward(build_input_batch([rows], cache.block_size))
        cache.read(cache.planes[0].name, range(1), np.zeros(1, dtype=np.int64))  # waits until a device has computed it
        if is_warm:
            price.add_step(time.perf_counter() - started, num_rows=num_rows, num_prompt_rows=num_rows)
