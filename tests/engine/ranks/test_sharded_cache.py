"""Rank 0's cache and the workers of other ranks, here threads: the order in which they work, and their heads."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.ranks.channel import RankLostError
from outrider.engine.ranks.sharded_cache import DividedKVCache, split_heads
from outrider.errors import InternalError
from tests.support.worker_ranks import (
    BLOCK_SIZE,
    FEATURES,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_LAYERS,
    PATIENCE_SECONDS,
    Ranks,
)

SLOTS = np.array([5, 0, 23, 17])


@pytest.fixture(params=[2, 4])
def ranks(request):
    yield from running(Ranks(request.param))


def running(ranks):
    yield ranks
    ranks.close()


@pytest.fixture
def stages():
    """Rank 1 has the first layer, and rank 0 the second."""
    yield from running(Ranks(2, [range(1, 2), range(1)]))


def whole_cache():
    planes = tuple(PlaneSpec(name, NUM_LAYERS, NUM_HEADS, HEAD_DIM, "float32") for name in ("k", "v"))
    cache = PagedKVCache((*planes, FEATURES), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values, *cache.layers(FEATURES.name)):
        tensor.normal_()
    return cache


def test_heads_are_split_in_order_and_evenly():
    assert split_heads(8, 1) == (range(8),)
    assert split_heads(8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    for num_ranks in (3, 16):
        with pytest.raises(ValueError, match="8 heads"):
            split_heads(8, num_ranks)


HEADS = [None, range(NUM_HEADS), range(1, 3), range(3, 4), range(3)]


@pytest.mark.parametrize("heads", HEADS)
def test_what_one_rank_has_is_what_several_have(ranks, heads):
    whole = whole_cache()
    assert ranks.cache.planes == whole.planes
    for plane in ("k", "v"):
        payload = whole.read(plane, range(NUM_LAYERS), SLOTS, heads=heads)
        ranks.cache.write(plane, range(NUM_LAYERS), SLOTS, payload.data, heads=heads)
        assert np.array_equal(ranks.cache.read(plane, range(NUM_LAYERS), SLOTS, heads=heads), payload)
        for part in HEADS[1:]:
            if heads is None:
                assert np.array_equal(
                    ranks.cache.read(plane, range(1, 2), SLOTS, heads=part),
                    whole.read(plane, range(1, 2), SLOTS, heads=part),
                )
    assert ranks.cache.head_ranges(FEATURES.name) == (range(1),), "rank 0 has them whole"
    payload = whole.read(FEATURES.name, range(1), SLOTS)
    ranks.cache.write(FEATURES.name, range(1), SLOTS, payload.data)
    assert np.array_equal(ranks.cache.read(FEATURES.name, range(1), SLOTS, heads=range(1)), payload)
    other = PagedKVCache(whole.planes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for held in ranks.cache.head_ranges("k"):  # as for a node with one rank
        payload = ranks.cache.read("k", range(NUM_LAYERS), SLOTS, heads=held)
        other.write("k", range(NUM_LAYERS), SLOTS, payload.data, heads=held)
    everything = ranks.cache.read("k", range(NUM_LAYERS), SLOTS)
    assert np.array_equal(other.read("k", range(NUM_LAYERS), SLOTS), everything)


@pytest.fixture(params=[None, [range(1, 2), range(1)]], ids=["ranks", "stages"])
def either(request):
    yield from running(Ranks(2, request.param))


def test_blocks_go_to_main_memory_and_come_back(either):
    divided, whole, slots = either.cache, whole_cache(), np.arange(NUM_BLOCKS * BLOCK_SIZE)
    for plane in whole.planes:
        layers, num_bytes = range(plane.num_layers), BLOCK_SIZE * plane.bytes_per_token
        divided.write(plane.name, layers, slots, whole.read(plane.name, layers, slots).data)
        rows, row = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        whole.save_block(plane.name, 1, rows)
        whole.load_block(plane.name, 4, rows)
        divided.save_block(plane.name, 1, row)
        divided.load_block(plane.name, 4, row)
        assert np.array_equal(divided.read(plane.name, layers, slots), whole.read(plane.name, layers, slots))


@pytest.fixture
def divided():
    """Two ranks with all heads and layers; rank 1 has the blocks from NUM_BLOCKS on."""
    ranks = Ranks(2, [range(NUM_LAYERS)] * 2)
    ranks.cache = DividedKVCache(ranks.caches[0], ranks.group)
    yield from running(ranks)


def test_what_one_cache_has_is_what_ranks_with_blocks_of_their_own_have(divided):
    cache, size = divided.cache, NUM_BLOCKS * BLOCK_SIZE
    assert cache.num_blocks == 2 * NUM_BLOCKS
    whole = PagedKVCache(cache.planes, num_blocks=2 * NUM_BLOCKS, block_size=BLOCK_SIZE)
    for tensor in (*whole.keys, *whole.values):
        tensor.normal_()
    slots = np.array([size + 5, 3, size, 0, 17, 2 * size - 1])
    for heads in HEADS:
        payload = whole.read("k", range(NUM_LAYERS), slots, heads=heads)
        cache.write("k", range(NUM_LAYERS), slots, payload.data, heads=heads)
        assert np.array_equal(cache.read("k", range(NUM_LAYERS), slots, heads=heads), payload)
        of_layer = cache.read("k", range(1, 2), slots[::2], heads=heads)
        assert np.array_equal(of_layer, whole.read("k", range(1, 2), slots[::2], heads=heads))
    for each in (cache, whole):
        each.move_slots([(3, 17), (size + 5, size)])
    assert np.array_equal(cache.read("k", range(NUM_LAYERS), slots), whole.read("k", range(NUM_LAYERS), slots))
    for slot in (-1, 2 * size):
        with pytest.raises(InternalError, match="outside the cache"):
            cache.read("k", range(1), np.array([slot]))
    with pytest.raises(InternalError, match="outside the 2 layers"):
        cache.read("k", range(3), slots)


def test_what_one_rank_has_is_what_stages_have(stages):
    whole = whole_cache()
    assert stages.cache.planes == whole.planes
    assert stages.cache.head_ranges("k") == (range(NUM_HEADS),)
    for plane in whole.planes:
        payload = whole.read(plane.name, range(plane.num_layers), SLOTS)
        stages.cache.write(plane.name, range(plane.num_layers), SLOTS, payload.data)
        for layers in (range(plane.num_layers), range(1), range(plane.num_layers - 1, plane.num_layers), range(0)):
            for heads in (None, range(1)):
                assert np.array_equal(
                    stages.cache.read(plane.name, layers, SLOTS, heads=heads),
                    whole.read(plane.name, layers, SLOTS, heads=heads),
                )
    for rank, layer in ((1, 0), (0, 1)):
        assert np.array_equal(
            stages.caches[rank].read("v", range(1), SLOTS), whole.read("v", range(layer, layer + 1), SLOTS)
        )
    for layers in (range(1, 3), range(2, 3), range(-1, 1)):
        with pytest.raises(InternalError, match="layers"):
            stages.cache.read("k", layers, SLOTS)
    everywhere = np.arange(NUM_BLOCKS * BLOCK_SIZE)
    for plane in ("k", "v"):
        stages.cache.write(plane, range(NUM_LAYERS), everywhere, whole.read(plane, range(NUM_LAYERS), everywhere).data)
    for cache in (whole, stages.cache):
        cache.copy_blocks([(0, 3), (2, 5)])
        cache.move_slots([(3, 4), (4, 6)])
    for plane in ("k", "v"):
        found, expected = (cache.read(plane, range(NUM_LAYERS), everywhere) for cache in (stages.cache, whole))
        assert np.array_equal(found, expected)


def test_blocks_are_copied_and_slots_moved_on_every_rank(ranks):
    whole = whole_cache()
    everywhere = np.arange(NUM_BLOCKS * BLOCK_SIZE)
    for plane in whole.planes:
        payload = whole.read(plane.name, range(plane.num_layers), everywhere)
        ranks.cache.write(plane.name, range(plane.num_layers), everywhere, payload.data)
    for cache in (whole, ranks.cache):
        cache.copy_blocks([(0, 3), (2, 5)])
        cache.move_slots([(3, 4), (4, 6)])
        cache.copy_blocks([])
    for plane in whole.planes:
        name, layers = plane.name, range(plane.num_layers)
        assert np.array_equal(ranks.cache.read(name, layers, everywhere), whole.read(name, layers, everywhere))


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"plane": "x"}, "plane"),
        ({"layers": range(3)}, "layers"),
        ({"slots": np.array([NUM_BLOCKS * BLOCK_SIZE])}, "slots"),
        ({"heads": range(5)}, "heads"),
        ({"heads": range(2, 2)}, "heads"),
        ({"plane": FEATURES.name, "heads": range(2)}, "heads"),
        ({"payload": bytes(47)}, "bytes"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, lie, problem):
    request = {"plane": "k", "layers": range(1), "slots": np.array([1]), "payload": bytes(48), **lie}
    request["payload"] = request["payload"] * len(request["layers"])
    with pytest.raises(InternalError, match=problem):
        ranks.cache.write(
            request["plane"], request["layers"], request["slots"], request["payload"], heads=request.get("heads")
        )
    with pytest.raises(InternalError, match="slots"):  # the error of another rank's check is raised, too
        ranks.cache.read("k", range(1), np.array([99]), heads=range(NUM_HEADS - 1, NUM_HEADS))


def test_a_read_waits_for_the_layers_that_its_fence_names(ranks):
    """Rank 0 has finished the first layer, which the others have not begun. A push contains what they write later."""
    answers = queue.SimpleQueue()
    first = np.array([0])
    with ranks.step():
        ranks.group.layer_done(0)
        fence = ranks.cache.fence()
        reader = threading.Thread(target=lambda: answers.put(ranks.cache.read("k", range(1), first, fence)))
        reader.start()
        for runner in ranks.runners:
            assert answers.empty()
            runner.gates.put(True)
        payload = answers.get(timeout=PATIENCE_SECONDS).view(np.float32).reshape(NUM_HEADS, HEAD_DIM)
        own = NUM_HEADS // ranks.group.size
        assert (payload[own:] == 1).all()
        for runner in ranks.runners:
            runner.gates.put(True)
    assert [runner.batches[0].arrays.token_ids.tolist() for runner in ranks.runners] == [[7]] * len(ranks.runners)


def test_a_write_waits_for_the_commands_before_it_but_not_for_the_step_at_hand(ranks):
    """An earlier copy may still read a block that was freed since. A step uses no block that a transfer writes."""
    value = np.full((1, 1, NUM_HEADS * HEAD_DIM), 5, dtype=np.float32).tobytes()
    ranks.cache.copy_blocks([(0, 1)])
    with ranks.step():
        ranks.cache.write("v", range(1), np.array([9]), value)  # meanwhile, other ranks wait in their first layer
        assert (ranks.caches[-1].values[0].flatten(0, 1)[9] == 5).all()
        for runner in ranks.runners:
            runner.gates.put(True)
            runner.gates.put(True)
    after = ranks.cache.read("k", range(NUM_LAYERS), np.array([0])).view(np.float32)
    own = NUM_HEADS // ranks.group.size
    assert (after.reshape(NUM_LAYERS, NUM_HEADS, HEAD_DIM)[:, own:] == 1).all()  # the read came after the whole step


def test_a_rank_that_is_gone_is_an_error_for_every_caller(ranks):
    ranks.group.members[-1].kv.close()
    with pytest.raises(RankLostError, match=f"rank {ranks.group.size - 1}"):
        ranks.cache.read("k", range(1), SLOTS)
    with pytest.raises(RankLostError):
        ranks.cache.write("k", range(1), np.array([1]), bytes(48))


def test_a_rank_whose_kv_cannot_be_read_for_any_reason_says_so_and_goes_on(ranks, monkeypatch):
    def fail(*_args, **_named):
        raise RuntimeError("out of memory")

    last = range(NUM_HEADS - 1, NUM_HEADS)
    with monkeypatch.context() as patch:
        patch.setattr(ranks.caches[-1], "read", fail)
        with pytest.raises(InternalError, match=r"RuntimeError: out of memory"):
            ranks.cache.read("k", range(1), SLOTS, heads=last)
    assert ranks.cache.read("k", range(1), SLOTS, heads=last).nbytes == len(SLOTS) * HEAD_DIM * 4
