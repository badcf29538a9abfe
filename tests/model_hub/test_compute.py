from __future__ import annotations

import pytest

from outrider.engine.kv_cache import paged_cache
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.compute import open_compute
from outrider.model_hub.config import ModelConfig
from tests.support.tiny_model import make_tiny_model


def test_the_cache_leaves_room_for_what_else_the_node_takes_of_main_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_cache, "free_memory_bytes", lambda _device: 1 << 30)
    path = make_tiny_model(tmp_path / "model", seed=5)

    def num_bytes(main_memory_bytes):
        compute = open_compute(
            ModelConfig(id=str(path), kernels="torch", num_threads=1, max_model_len=128),
            KVCacheConfig(memory="50%"),
            max_rows_per_step=16,
            main_memory_bytes=main_memory_bytes,
            on_rank_lost=print,
        )
        kv_cache = compute.kv_cache
        return kv_cache.num_blocks * kv_cache.block_size * compute.model.spec.bytes_per_token

    assert num_bytes(0) - num_bytes(1 << 28) == pytest.approx(1 << 27, rel=0.01)
