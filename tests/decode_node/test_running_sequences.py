"""How many sequences run by default, on a CPU and on a GPU."""

from __future__ import annotations

import pytest

import decode_node.__main__ as decode_main
import prefill_node.__main__ as prefill_main
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.rpc.tls import PLAINTEXT
from prefill_node.config import PrefillNodeConfig
from tests.decode_node.tiny_node import TinyNode


@pytest.mark.parametrize(
    ("kind", "settings", "decode", "prefill"),
    [("cpu", {}, 64, 16), ("cuda", {}, 256, 64), ("cuda", {"max_running_sequences": 3}, 3, 3)],
)
def test_a_gpu_runs_more_sequences_unless_settings_say_otherwise(
    tiny_model, monkeypatch, kind, settings, decode, prefill
):
    for module in (decode_main, prefill_main):
        monkeypatch.setattr(module, "device_type", lambda _device: kind)
    node = TinyNode(tiny_model, **settings)
    assert node.parts.description["max_running_sequences"] == decode
    assert node.groups.num_sequences_free == decode
    config = PrefillNodeConfig(kv_cache=KVCacheConfig(num_blocks=64), **settings)
    build = prefill_main.make_build(config, ModelConfig(id=str(tiny_model), num_threads=1, head=""), PLAINTEXT)
    parts = build(lambda *_: None)
    assert parts.engine.scheduler._max_running == prefill
