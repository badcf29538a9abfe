from __future__ import annotations

import pytest

from outrider.engine import memory
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.compute import open_compute
from outrider.model_hub.config import ModelConfig
from outrider.speculation.proposers.base import MAX_INDEX_BYTES
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer
from tests.decode_node.tiny_node import TinyNode
from tests.support.tiny_model import make_tiny_model

FREE_BYTES, OTHER_BYTES = 1 << 30, 1 << 28
HALF = KVCacheConfig(memory="50%")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_main_memory_bytes", lambda: FREE_BYTES)
    path = make_tiny_model(tmp_path / "model", seed=5)
    return ModelConfig(id=str(path), kernels="torch", num_threads=1, max_model_len=128)


def test_the_cache_leaves_room_for_what_else_the_node_takes_of_main_memory(model):
    def num_bytes(main_memory_bytes):
        compute = open_compute(
            model, HALF, max_rows_per_step=16, main_memory_bytes=main_memory_bytes, on_rank_lost=print
        )
        kv_cache = compute.kv_cache
        return kv_cache.num_blocks * kv_cache.block_size * compute.model.spec.bytes_per_token

    assert num_bytes(0) - num_bytes(OTHER_BYTES) == pytest.approx(OTHER_BYTES / 2, rel=0.01)


def test_a_decode_nodes_cache_leaves_room_for_its_proposer(model):
    nodes = [TinyNode(model.id, kv_cache=HALF, local_fallback=fallback) for fallback in ("none", "ngram")]
    without, beside = (node.parts.description["kv_blocks"] for node in nodes)
    assert beside / without == pytest.approx(1 - MAX_INDEX_BYTES / FREE_BYTES, rel=0.01)


def test_a_draft_models_cache_leaves_room_for_what_the_node_holds(model):
    settings = ProposerSettings(model=model, kv_cache=HALF, other_memory_bytes=OTHER_BYTES)
    memory_bytes = make_proposer("draft_model", settings).info.memory_bytes
    assert memory_bytes == pytest.approx((FREE_BYTES - OTHER_BYTES) / 2, rel=0.01)
