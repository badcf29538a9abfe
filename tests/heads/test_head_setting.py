"""`model.head`: what prefill and decode nodes make of it when they start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.__main__ import make_build as make_decode
from decode_node.config import DecodeNodeConfig
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.heads.open import reduction_of
from outrider.model_hub.config import ModelConfig
from outrider.rpc.peer_security import PLAINTEXT
from outrider.service.config import ServerConfig
from prefill_node.__main__ import make_build as make_prefill
from prefill_node.config import PrefillNodeConfig
from tests.support.tiny_head import make_tiny_head
from tests.support.tiny_model import make_tiny_model

KV_CACHE = KVCacheConfig(num_blocks=128)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model, head = make_tiny_model(folder / "model"), make_tiny_head(folder / "head")
    return ModelConfig(id=str(model), head=str(head), num_threads=1)


def open_prefill(config):
    return make_prefill(PrefillNodeConfig(kv_cache=KV_CACHE), config, PLAINTEXT)(lambda ended, stats: None)


def open_decode(config):
    node = DecodeNodeConfig(kv_cache=KV_CACHE, local_head=False)
    return make_decode(node, config, ServerConfig(), PLAINTEXT)(bytes(16), "decode", lambda *_: None)


def test_prefill_and_decode_nodes_keep_the_features_of_the_head_and_say_so(config):
    reduction = reduction_of(config)
    prefill, decode = open_prefill(config), open_decode(config)
    for parts, cache in ((prefill, prefill.loop._kv_cache), (decode, decode.engine.kv_cache)):
        assert cache.planes[2:] == (reduction.plane("float32"),)
        assert parts.model.features == reduction.format("float32")
        assert parts.description["features"] == f"{reduction.fingerprint[:16]} (64 numbers of float32, taps 3)"
    plain = open_prefill(replace(config, head=""))
    assert (plain.model.features, plain.description["features"]) == (None, "none")
    assert plain.model.fingerprint == prefill.model.fingerprint, "the answer does not depend on the head"


@pytest.mark.parametrize("open_node", [open_prefill, open_decode])
def test_a_head_of_another_target_is_refused_at_the_start(config, tmp_path, open_node):
    other = replace(config, head=str(make_tiny_head(tmp_path / "head", hidden_size=48)))
    with pytest.raises(ConfigError, match="made for another target: hidden_size 48 of the head, 64 of the target"):
        open_node(other)
    with pytest.raises(ConfigError, match=r"model\.head is '.*nowhere': there is no such folder"):
        open_node(replace(config, head=str(tmp_path / "nowhere")))
