"""Blocks leave a cache for main memory and come back in every plane, as they were."""

from __future__ import annotations

import errno
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from outrider.engine import host_memory
from outrider.engine.host_memory import open_host_store
from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec
from outrider.errors import ConfigError
from tests.support.native_kernels import native_kernels

BLOCK, NUM_BLOCKS, NUM_WINDOW_BLOCKS = 16, 6, 3
PLANES = (
    PlaneSpec("k", 2, 2, 16, "bfloat16"),
    PlaneSpec("v", 2, 2, 16, "bfloat16"),
    PlaneSpec("k-32", 1, 2, 16, "bfloat16", window=32),
    PlaneSpec("v-32", 1, 2, 16, "bfloat16", window=32),
    PlaneSpec("feature-x", 1, 1, 24, "bfloat16"),
)
GROUPS = (LayerGroup((0, 2)), LayerGroup((1,), window=32))


@pytest.fixture(params=["native", "torch"])
def cache(request):
    kernels = native_kernels() if request.param == "native" else None
    return PagedKVCache(
        PLANES,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        kernels=kernels,
        layer_groups=GROUPS,
        window_blocks=[NUM_WINDOW_BLOCKS],
    )


def fill(cache):
    """Fills the cache with random bytes and returns them by plane: [layers, blocks, bytes]."""
    random, content = np.random.default_rng(1), {}
    for plane in PLANES:
        num_blocks = NUM_WINDOW_BLOCKS if plane.window else NUM_BLOCKS
        rows = random.integers(0, 256, plane.bytes_per_token * num_blocks * BLOCK, dtype=np.uint8)
        cache.write(plane.name, range(plane.num_layers), np.arange(num_blocks * BLOCK), rows)
        content[plane.name] = rows.reshape(plane.num_layers, num_blocks, -1)
    return content


def assert_holds(cache, content):
    for plane in PLANES:
        blocks = content[plane.name]
        found = cache.read(plane.name, range(plane.num_layers), np.arange(blocks.shape[1] * BLOCK))
        assert np.array_equal(found.reshape(blocks.shape), blocks), plane.name


def price():
    return CopyPrice(block_size=BLOCK, num_groups=2, max_rows=64)


def test_blocks_come_back_in_all_planes_of_their_group(cache):
    content = fill(cache)
    copies = BlockCopies(cache, 30_000, price())
    for group, block_id, slot, target in [(0, 1, 0, 4), (1, 2, 0, 0), (0, 3, 1, 1)]:
        copies.save(group, block_id, slot)
        for plane in PLANES:
            if plane.window == GROUPS[group].window:
                content[plane.name][:, target] = content[plane.name][:, block_id]
        copies.load(group, target, slot)
    assert_holds(cache, content)
    copies.measure(0, 2)
    copies.measure(1, 1)
    assert_holds(cache, content)


def test_memory_is_bounded_nameless_and_divided_by_blocks(cache):
    copies = BlockCopies(cache, 30_000, price())
    assert copies.slot_bytes == [BLOCK * (2 * 2 * 64 + 48), BLOCK * 128]
    full, window = copies.num_slots
    assert (full, window) == (4, 1)
    assert sum(rows.nbytes for rows in copies.rows) == copies.memory.nbytes <= 30_000
    maps = Path("/proc/self/maps").read_text()
    begin = copies.memory.ctypes.data  # of a mapping that is free again however the process ends
    assert re.search(rf"(?m)^0*{begin:x}-\w+ rw-s .* /dev/zero \(deleted\)$", maps)
    with pytest.raises(ConfigError, match="host_memory of 9,000 bytes holds too few blocks"):
        BlockCopies(cache, 9_000, price())


def test_memory_that_the_os_does_not_grant_is_refused(cache, monkeypatch):
    """It may limit what is reserved, whatever is free."""

    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match="host_memory of 30,000 bytes: Cannot allocate memory: set it lower"):
        BlockCopies(cache, 30_000, price())


def test_copies_are_timed(cache):
    times = iter([0.0, 1.0, 10.0, 12.0, 0.0, 0.25, 0.0, 0.5])
    found = price()
    copies = BlockCopies(cache, 30_000, found, now=lambda: next(times))
    copies.measure(0, 0)
    copies.measure(1, 0)
    assert str(found) == "save 1250.000 ms, load 2500.000 ms, compute inf ms"


def test_memory_that_is_not_free_is_refused(cache, monkeypatch):
    cache_bytes = BLOCK * (NUM_BLOCKS * (2 * 2 * 64 + 48) + NUM_WINDOW_BLOCKS * 128)
    monkeypatch.setattr(host_memory, "free_main_memory_bytes", lambda: cache_bytes + 29_999)
    with pytest.raises(ConfigError, match=r"host_memory is 30,000 bytes, but only 29,999 bytes .* besides"):
        open_host_store(cache, None, 30_000, max_rows=64)


@pytest.mark.parametrize(("text", "num_bytes"), [("0", 0), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("7", 7)])
def test_sizes(text, num_bytes):
    assert KVCacheConfig(host_memory=text).host_bytes == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "20%", "8GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=f"host_memory '{text}' is not a size, such as 8GiB"):
        KVCacheConfig(host_memory=text)


def test_host_memory_needs_the_prefix_cache():
    with pytest.raises(ValueError, match="host_memory needs prefix_cache"):
        KVCacheConfig(host_memory="1GiB", prefix_cache=False)
    assert KVCacheConfig(prefix_cache=False).host_bytes == 0
