"""Models with sliding windows over tables that hold the window only have the logits of one table for all tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.graph_shapes import Bucket, GraphShapes, pad
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import BlockPool, WindowPool
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.memory import KVMemory, pool_size
from outrider.engine.model_runner import make_runner
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.engine.test_step_graphs import graphs_of
from tests.families.families import GEMMA, TWO_OF_THREE, VOCAB_SIZE
from tests.support.tiny_model import make_tiny_model

BLOCK = 16
WINDOW = 12
NUM_BLOCKS, WINDOW_BLOCKS = 40, 24
LENGTH = 230
CHUNK = 40
TREE = (-1, -1, 1)
MODELS = {
    "native decoder": ("gemma3_text", GEMMA, {}),
    "by layers": ("cohere2", TWO_OF_THREE, {}),
    "torch": ("gemma3_text", GEMMA, {"kernels": "torch"}),
    "all layers have windows": ("mistral", {"sliding_window": WINDOW}, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    model_type, overrides, settings = MODELS[request.param]
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, architecture=model_type, vocab_size=VOCAB_SIZE, overrides=overrides, seed=1)
    return load_model(ModelConfig(id=str(path), num_threads=1, cache_dir=str(path / "cache"), **settings))


class Windowed:
    """A runner whose sequences hold windows only. Blocks that no sequence holds are full of NaN."""

    def __init__(self, model, attention):
        sizes = {"block_size": BLOCK, "hash_seed": b""}
        window = WindowPool(
            window=WINDOW, max_step_tokens=CHUNK, first_block=NUM_BLOCKS, num_blocks=WINDOW_BLOCKS, **sizes
        )
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, windows=[window], **sizes)
        self.cache = model.make_cache(NUM_BLOCKS, BLOCK, (WINDOW_BLOCKS,))
        self.runner = make_runner(model, self.cache, attention)
        self.poison()

    def poison(self):
        for group, pool in zip(self.cache.layer_groups, (self.pool, *self.pool.windows), strict=True):
            blocks = [block for block, count in enumerate(pool._ref_counts) if count == 0]
            slots = (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            for plane in self.cache.planes:
                if plane.window == group.window:
                    rows = np.full(slots.size * plane.bytes_per_token, 0xFF, np.uint8)  # NaN in every dtype
                    self.cache.write(plane.name, range(plane.num_layers), slots, rows.tobytes())

    def rows(self, kv, token_ids, num_logits, parents=()):
        self.cache.copy_blocks(kv.reserve(kv.num_tokens + len(token_ids)))
        return SequenceRows(
            token_ids, kv.num_tokens, kv.block_table(), num_logits, parents, window_tables=kv.window_tables()
        )

    def forward(self, *rows):
        logits = torch.as_tensor(self.runner.forward(build_input_batch(rows, BLOCK))).clone()
        self.poison()
        return logits


def check(model, attentions):
    token_ids = np.random.default_rng(2).integers(3, VOCAB_SIZE, LENGTH).tolist()
    expected_cache = model.make_cache(NUM_BLOCKS, BLOCK)
    reference = make_runner(model, expected_cache, attentions[0])
    tables = (range(15), range(15, 30))

    def expected(*rows):
        return torch.as_tensor(reference.forward(build_input_batch(rows, BLOCK))).clone()

    windowed = Windowed(model, attentions[1])
    first, second = SequenceKV(windowed.pool), SequenceKV(windowed.pool)
    for start in range(0, LENGTH - 10, CHUNK):
        part = token_ids[start : min(start + CHUNK, LENGTH - 10)]
        found = windowed.forward(windowed.rows(first, part, len(part)), windowed.rows(second, part[::-1], 1))
        wanted = expected(
            SequenceRows(part, start, tables[0], len(part)), SequenceRows(part[::-1], start, tables[1], 1)
        )
        assert torch.equal(found, wanted)
        for kv in (first, second):
            kv.advance(start + len(part))
    assert first.windows[0].first * BLOCK == 128  # of 220 tokens
    at = LENGTH - 10
    draft = [token_ids[at], *(7, token_ids[at + 1], token_ids[at + 2])]
    found = windowed.forward(windowed.rows(first, draft, 4, TREE), windowed.rows(second, [5], 1))
    wanted = expected(SequenceRows(draft, at, tables[0], 4, TREE), SequenceRows([5], at, tables[1], 1))
    assert torch.equal(found, wanted)
    for place, index in ((0, 1), (1, 2)):  # the accepted branch moves to the slots of its positions
        pairs = zip(first.slots_of_groups(at + 1 + index), first.slots_of_groups(at + 1 + place), strict=True)
        windowed.cache.move_slots(list(pairs))
        places = (at + 1 + index, at + 1 + place)
        expected_cache.move_slots([tuple(tables[0][p // BLOCK] * BLOCK + p % BLOCK for p in places)])
    first.truncate(at + 3)
    second.truncate(at + 1)
    fork = first.fork()
    found = windowed.forward(*(windowed.rows(kv, [9 + place], 1) for place, kv in enumerate((first, second, fork))))
    wanted = expected(SequenceRows([9], at + 3, tables[0], 1), SequenceRows([10], at + 1, tables[1], 1))
    assert torch.equal(found[:2], wanted)
    wanted = expected(SequenceRows([11], at + 3, tables[0], 1), SequenceRows([10], at + 1, tables[1], 1))
    assert torch.equal(found[2], wanted[0])


def test_windows_change_no_bit(loaded):
    assert loaded.spec.windows
    check(loaded, [make_attention_backend("auto", "cpu") for _ in range(2)])


@pytest.mark.triton
@pytest.mark.parametrize("loaded", ["torch"], indirect=True)
def test_windows_change_no_bit_in_our_kernel(loaded):
    pytest.importorskip("triton")
    from tests.support.interpreted_triton import interpreted_attention

    heads = {"num_heads": loaded.spec.num_heads, "num_kv_heads": loaded.spec.num_kv_heads}
    check(loaded, [interpreted_attention(**heads) for _ in range(2)])


@pytest.mark.triton
@pytest.mark.parametrize("loaded", ["torch"], indirect=True)
def test_steps_over_windows_can_be_captured(loaded):
    """All that a forward takes from the host is the same for each batch of a bucket."""
    pytest.importorskip("triton")
    from tests.support.interpreted_triton import interpreted_attention

    heads = {"num_heads": loaded.spec.num_heads, "num_kv_heads": loaded.spec.num_kv_heads}
    plain, captured = (Windowed(loaded, interpreted_attention(**heads)) for _ in range(2))
    runner = captured.runner
    runner._graphs = graphs_of(
        runner._compute,
        GraphShapes(8, has_trees=True),
        runner._attention.plan,
        scratch_blocks=(NUM_BLOCKS - 1, WINDOW_BLOCKS - 1),
    )
    sequences = [[SequenceKV(each.pool) for _ in range(2)] for each in (plain, captured)]
    token_ids = np.random.default_rng(4).integers(3, VOCAB_SIZE, 200).tolist()
    for start in range(0, 160, CHUNK):
        for each, kvs in zip((plain, captured), sequences, strict=True):
            each.forward(*(each.rows(kv, token_ids[start : start + CHUNK], 1) for kv in kvs))
            for kv in kvs:
                kv.advance(start + CHUNK)
    for num_rows, parents in ((1, ()), (4, TREE), (3, ())):
        found = []
        for each, kvs in zip((plain, captured), sequences, strict=True):
            found.append(each.forward(
                each.rows(kvs[0], token_ids[:num_rows], num_rows, parents), each.rows(kvs[1], [6], 1)
            ))  # fmt: skip
            for kv in kvs:
                kv.truncate(kv.num_tokens + 1)
        torch.testing.assert_close(*found)


def test_padding_has_a_scratch_block_in_each_group():
    rows = SequenceRows([1, 2, 3, 4], 30, range(3), 4, TREE, window_tables=[array("i", (5, 6, 7))])
    batch = build_input_batch([rows], BLOCK)
    padded = pad(batch, Bucket(8, has_trees=True), (90, 40)).arrays
    slots, scratch = padded.slot_mapping.tolist(), range(4)
    assert slots == [
        30, 31, 32, 33, *(90 * BLOCK + row for row in scratch),
        6 * BLOCK + 14, 6 * BLOCK + 15, 7 * BLOCK, 7 * BLOCK + 1, *(40 * BLOCK + row for row in scratch),
    ]  # fmt: skip
    assert padded.block_tables.tolist() == [0, 1, 2, 90, 5, 6, 7, 40]
    half, num = len(padded.path_slots) // 2, padded.path_starts[4]
    assert padded.path_slots[:num].tolist() == [31, 32, 32, 33]
    assert padded.path_slots[half : half + num].tolist() == [111, 112, 112, 113]
    assert padded.table_starts.tolist()[:3] == [0, 3, 4]


def test_memory_is_divided_among_groups(loaded):
    spec = loaded.spec
    room = KVMemory(free_bytes=1 << 30, whole_bytes=1 << 30)
    size = pool_size(spec, KVCacheConfig(memory="4MiB"), room, max_step_tokens=CHUNK)
    (num_window,) = size.window_blocks
    assert num_window == max(2 * 8, -(-size.num_blocks * 4 // 10))
    of_group = {window: sum(p.bytes_per_token for p in spec.planes if p.window == window) for window in (0, WINDOW)}
    taken = BLOCK * (size.num_blocks * of_group[0] + num_window * of_group[WINDOW])
    assert (4 << 20) - 2 * BLOCK * spec.bytes_per_token < taken <= 4 << 20
    assert pool_size(spec, KVCacheConfig(num_blocks=200), room, max_step_tokens=CHUNK).window_blocks == (80,)
    assert pool_size(spec, KVCacheConfig(num_blocks=200), room).window_blocks is None
    with pytest.raises(ValueError, match="window_share must be above 0"):
        KVCacheConfig(window_share=0.0)
