"""The KV cache of native kernels: its layout, and that reads and writes work as in a plain cache."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec

NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_SLOTS = 3, 2, 48, 96
WORDS = {"float32": np.uint32, "bfloat16": np.uint16}
EVERYTHING = np.arange(NUM_SLOTS)


def make_cache(kernels, dtype, block_size=16):
    planes = [PlaneSpec(name, NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype) for name in ("k", "v")]
    planes.append(PlaneSpec("feature-x", 1, 1, 8, dtype))
    return PagedKVCache(planes, num_blocks=NUM_SLOTS // block_size, block_size=block_size, kernels=kernels)


def fill(cache, seed=0):
    """Fills all slots with random bytes."""
    random = np.random.default_rng(seed)
    for plane in cache.planes:
        layers = range(plane.num_layers)
        cache.write(plane.name, layers, EVERYTHING, random.bytes(NUM_SLOTS * plane.bytes_per_token))
    return cache


def contents(cache):
    return [cache.read(plane.name, range(plane.num_layers), EVERYTHING).tobytes() for plane in cache.planes]


@pytest.mark.parametrize("dtype", WORDS)
def test_sixteen_slots_of_a_head_are_a_panel_of_packed_weights(kernels, dtype):
    cache = fill(make_cache(kernels, dtype))
    size = 4 // WORDS[dtype]().itemsize  # numbers in a 4-byte word
    shape = (NUM_LAYERS, NUM_SLOTS // 16, 16, NUM_HEADS, HEAD_DIM)  # [layers, panels, keys, heads, columns]
    keys, values = (
        cache.read(plane, range(NUM_LAYERS), EVERYTHING).view(WORDS[dtype]).reshape(shape) for plane in ("k", "v")
    )
    in_words = keys.reshape(*shape[:4], HEAD_DIM // size, size)
    expected = in_words.transpose(0, 1, 3, 4, 2, 5)  # [layers, panels, heads, words, keys, size]
    assert np.array_equal(cache.keys.view(WORDS[dtype]).ravel(), expected.ravel())
    in_words = values.reshape(NUM_LAYERS, -1, 16 // size, size, NUM_HEADS, HEAD_DIM // 16, 16)
    expected = in_words.transpose(0, 1, 4, 5, 2, 6, 3)  # [layers, panels, heads, sixteens, pairs, columns, size]
    assert np.array_equal(cache.values.view(WORDS[dtype]).ravel(), expected.ravel())
    assert cache.keys.ctypes.data % 64 == cache.values.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("plane", ["k", "v"])
def test_rows_go_in_and_out_as_of_a_plain_cache(kernels, dtype, plane):
    packed, plain = (fill(make_cache(each, dtype)) for each in (kernels, None))
    assert contents(packed) == contents(plain)
    slots, others = np.array([95, 0, 17, 16, 40]), np.array([3, 94, 5, 31, 70])
    taken = packed.read(plane, range(1, 3), slots, heads=range(1, 2))
    assert taken.tobytes() == plain.read(plane, range(1, 3), slots, heads=range(1, 2)).tobytes()
    for cache in (packed, plain):
        unaligned = memoryview(b"x" + taken.tobytes())[1:]
        cache.write(plane, range(2), others, unaligned, heads=range(1))
    assert contents(packed) == contents(plain)
    assert contents(packed) != contents(fill(make_cache(kernels, dtype)))


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
def test_blocks_and_slots_are_copied_as_in_a_plain_cache(kernels, block_size):
    packed, plain = (fill(make_cache(each, "bfloat16", block_size)) for each in (kernels, None))
    for cache in (packed, plain):
        cache.copy_blocks([(0, 2), (1, 0)])
        cache.move_slots([(9, 8), (11, 9), (94, 11), (8, 94)])
        cache.copy_blocks([])
        cache.move_slots([])
    assert contents(packed) == contents(plain)
    assert contents(packed) != contents(fill(make_cache(kernels, "bfloat16", block_size)))
