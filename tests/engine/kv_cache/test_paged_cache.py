from __future__ import annotations

import dataclasses
import threading

import numpy as np
import psutil
import pytest
import torch

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import LinearAttention, PlaneSpec
from outrider.engine.memory import KVMemory, pool_size
from outrider.engine.model_spec import ModelSpec
from outrider.errors import ConfigError, InternalError

SPEC = ModelSpec(
    architecture="Tiny",
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=100,
    max_model_len=64,
    dtype="float32",
)


def make_cache(dtype="float32", num_blocks=6, block_size=4):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    cache = PagedKVCache(spec.planes, layer_groups=spec.layer_groups, num_blocks=num_blocks, block_size=block_size)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plane", ["k", "v"])
def test_what_is_read_can_be_written_into_a_cache_of_another_block_size(plane, dtype):
    source, destination = make_cache(dtype), make_cache(dtype, num_blocks=10, block_size=3)
    taken = np.array([5, 1, 22, 23])
    placed = np.array([29, 0, 4, 17])
    payload = source.read(plane, range(1, 3), taken)
    assert payload.dtype == np.uint8
    assert payload.nbytes == 2 * 4 * source.planes[0].bytes_per_token_per_layer
    destination.write(plane, range(1, 3), placed, memoryview(payload))
    for layer in (1, 2):
        wrote = (destination.keys if plane == "k" else destination.values)[layer].flatten(0, 1)[placed]
        read = (source.keys if plane == "k" else source.values)[layer].flatten(0, 1)[taken]
        assert torch.equal(wrote, read)
    assert np.array_equal(destination.read(plane, range(1, 3), placed), payload)


def test_the_payload_is_layer_by_layer_and_token_major():
    cache = make_cache()
    payload = cache.read("v", range(2), np.array([3, 9])).view(np.float32).reshape(2, 2, 2, 4)
    assert torch.equal(torch.from_numpy(payload[1, 0]), cache.values[1][0, 3])
    assert torch.equal(torch.from_numpy(payload[0, 1]), cache.values[0][2, 1])


def test_a_further_plane_is_kept_copied_and_handed_on_like_keys_and_values():
    """The plane has another number of layers and another width, like the features of a draft head."""
    planes = (*SPEC.planes, PlaneSpec("feature", 1, 1, 12, "bfloat16"))
    source, destination = (PagedKVCache(planes, num_blocks=6, block_size=4) for _ in range(2))
    (features,) = source.layers("feature")
    features.normal_()
    source.copy_blocks([(1, 5)])
    assert torch.equal(features[5], features[1])
    slots = np.array([5, 22])
    destination.write("feature", range(1), slots, source.read("feature", range(1), slots).data)
    assert torch.equal(destination.layers("feature")[0].flatten(0, 1)[slots], features.flatten(0, 1)[slots])


def test_a_read_only_and_unaligned_payload_is_written():
    cache = make_cache()
    payload = cache.read("k", range(1), np.array([0])).tobytes()
    cache.write("k", range(1), np.array([8]), memoryview(b"x" + payload)[1:])
    assert torch.equal(cache.keys[0][2, 0], cache.keys[0][0, 0])


@pytest.mark.parametrize(
    ("plane", "layers", "slots", "size", "heads"),
    [
        ("k", range(3), [24], 96, None),
        ("k", range(3), [-1], 96, None),
        ("k", range(2, 4), [0], 64, None),
        ("k", range(-1, 1), [0], 64, None),
        ("k", range(0, 3, 2), [0], 64, None),
        ("q", range(3), [0], 96, None),
        ("k", range(3), [0], 95, None),
        ("k", range(3), [0, 1], 96, None),
        ("k", range(3), [], 1, None),
        *(
            ("k", range(1), [3], 16 * len(heads), heads)
            for heads in (range(3), range(2, 3), range(1, 1), range(-1, 1), range(0, 2, 2))
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused_and_nothing_written(plane, layers, slots, size, heads):
    cache = make_cache()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    with pytest.raises(InternalError):
        cache.write(plane, layers, np.array(slots, dtype=np.int64), b"\1" * size, heads=heads)
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.keys, *cache.values), strict=True))


def test_blocks_are_copied_in_every_layer_and_plane():
    cache = make_cache()
    cache.copy_blocks([(0, 5), (1, 4)])
    for tensor in (*cache.keys, *cache.values):
        assert torch.equal(tensor[5], tensor[0])
        assert torch.equal(tensor[4], tensor[1])
        assert not torch.equal(tensor[3], tensor[0])
    cache.copy_blocks([])


def test_memory_is_taken_only_as_blocks_are_written():
    before = psutil.Process().memory_info().rss
    planes = dataclasses.replace(SPEC, num_kv_heads=64, head_dim=64).planes
    cache = PagedKVCache(planes, num_blocks=1000, block_size=16)  # 1.5 GB
    assert psutil.Process().memory_info().rss - before < 200e6
    assert float(cache.keys[2][999].abs().max()) == 0.0


def test_threads_write_disjoint_blocks_at_the_same_time():
    cache = make_cache(num_blocks=40)
    payloads = {block: bytes([block]) * (3 * 4 * 32) for block in range(40)}

    def write(blocks):
        for block in blocks:
            for _ in range(20):
                cache.write("k", range(3), np.arange(block * 4, block * 4 + 4), payloads[block])

    threads = [threading.Thread(target=write, args=(range(part, 40, 4),)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for block, payload in payloads.items():
        assert cache.read("k", range(3), np.arange(block * 4, block * 4 + 4)).tobytes() == payload


BLOCK_BYTES = SPEC.bytes_per_token * 4


def room_of(num_blocks):
    """Returns the sizes of a main memory with room for this number of blocks."""
    return KVMemory(free_bytes=num_blocks * BLOCK_BYTES, whole_bytes=num_blocks * BLOCK_BYTES)


ROOM = room_of(10_000)


def blocks(room=ROOM, **settings):
    return pool_size(SPEC, KVCacheConfig(block_size=4, **settings), room)[0]


def test_a_pool_is_sized_by_setting_or_free_memory_and_holds_two_windows_where_there_is_room():
    assert blocks(num_blocks=50) == 50
    assert blocks(memory=f"{70 * BLOCK_BYTES + 1}B") == 70
    assert blocks(memory="50%") == 5000
    assert blocks(room_of(40), memory="10%") == 32  # the blocks of two windows of 64 tokens
    assert blocks(room_of(20)) == 20  # one window is enough


def test_a_pool_that_cannot_hold_a_window_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"num_blocks.*model\.max_model_len"):
        blocks(num_blocks=15)
    with pytest.raises(ConfigError, match=r"model\.max_model_len to 60"):
        blocks(room_of(15))


GPU_ROOM = KVMemory(
    free_bytes=500 * BLOCK_BYTES,
    whole_bytes=1000 * BLOCK_BYTES,
    own_bytes=250 * BLOCK_BYTES,
    default_share=0.9,
    num_windows=0,
)
"""Half of the GPU's memory is free. This process takes a quarter of the memory, not counting its KV."""


def test_a_share_of_a_gpu_is_of_all_its_memory_and_weights_count():
    assert blocks(GPU_ROOM) == 500  # the share leaves 650 blocks, but only 500 are free
    assert blocks(GPU_ROOM, memory="45%") == 200
    assert blocks(GPU_ROOM, memory="26.7%") == 17  # no more than the share, although more is free
    with pytest.raises(ConfigError, match=r"64 tokens needs 12,288 bytes.*kv_cache\.memory gives 0 after 192,000 for"):
        blocks(GPU_ROOM, memory="20%")
    assert blocks(GPU_ROOM, memory=f"{70 * BLOCK_BYTES}B") == 70


def test_too_little_memory_for_the_least_number_of_states_gives_no_blocks():
    linear = LinearAttention((0, 1), 64, 2, 256, 4)
    spec = dataclasses.replace(SPEC, num_layers=4, linear=linear)
    with pytest.raises(ConfigError, match=r"kv_cache\.memory gives 1,000 after 192,000 for"):
        pool_size(spec, KVCacheConfig(memory="1000B"), GPU_ROOM, max_step_tokens=16)


@pytest.mark.parametrize(
    ("num_blocks", "window"), [(3000, 10_000), (2500, 10_000), (2499, 9216), (600, 2048), (256, 1024), (255, None)]
)
def test_a_window_is_as_long_as_the_pool_in_even_steps(num_blocks, window):
    """A window shortened to the pool is a multiple of 1,024 tokens. A shorter one is refused."""
    spec = dataclasses.replace(SPEC, max_model_len=10_000)
    on_gpu = dataclasses.replace(GPU_ROOM, whole_bytes=10**9, free_bytes=num_blocks * BLOCK_BYTES)
    for config, room in (
        (KVCacheConfig(block_size=4, num_blocks=num_blocks), room_of(1)),
        (KVCacheConfig(block_size=4), room_of(num_blocks)),
        (KVCacheConfig(block_size=4), on_gpu),
    ):
        if window is None:
            with pytest.raises(ConfigError, match="one window of 10000 tokens needs"):
                pool_size(spec, config, room, may_shorten=True)
        else:
            assert pool_size(spec, config, room, may_shorten=True) == (num_blocks, window, None, 0)


def test_slots_move_together_in_all_layers_and_planes():
    cache = make_cache("bfloat16")
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.move_slots([(9, 8), (11, 9), (14, 11)])
    for moved, old in zip((*cache.keys, *cache.values), before, strict=True):
        expected = old.flatten(0, 1)[[*range(8), 9, 11, 10, 14, *range(12, 24)]]
        assert torch.equal(moved.flatten(0, 1), expected)
    cache.move_slots([])
