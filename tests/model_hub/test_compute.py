from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from outrider.engine import memory
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_turns import open_turns
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.open_runner import open_runner
from outrider.errors import ConfigError
from outrider.model_hub import compute as compute_module
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.speculation.proposers import model_forward
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
        compute = open_model_runtime(
            model, HALF, max_rows_per_step=16, main_memory_bytes=main_memory_bytes, on_rank_lost=print
        )
        kv_cache = compute.kv_cache
        return kv_cache.num_blocks * kv_cache.block_size * compute.model.spec.bytes_per_token

    assert num_bytes(0) - num_bytes(OTHER_BYTES) == pytest.approx(OTHER_BYTES / 2, rel=0.01)


def test_the_cache_leaves_room_for_adapters(model, tmp_path):
    native = replace(model, kernels="auto", keep_packed=False)

    def num_bytes(**settings):
        compute = open_model_runtime(replace(native, **settings), HALF, max_rows_per_step=16, on_rank_lost=print)
        if not isinstance(compute.model.native, NativeDecoder):
            pytest.skip("no native kernels")
        return compute.kv_cache.num_blocks * compute.kv_cache.block_size * compute.model.spec.bytes_per_token

    without = num_bytes(adapter_memory_bytes=OTHER_BYTES)
    reserved = num_bytes(adapter_memory_bytes=OTHER_BYTES, adapter_directory=str(tmp_path))
    assert without - reserved == pytest.approx(OTHER_BYTES / 2, rel=0.01)


def test_a_model_is_loaded_and_its_cache_allocated_in_one_turn_of_the_gpu(model, monkeypatch):
    """Another process that needs the GPU's turn waits meanwhile, and reports that."""
    stages = []

    @contextmanager
    def turn(devices, progress):
        stages.append(("begins", devices))
        progress("gpu", 0, 0)
        yield
        stages.append("ends")

    def note(module, name):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))

    def noted(call, *arguments, **keywords):
        stages.append(call.__name__)
        return call(*arguments, **keywords)

    for module in (compute_module, model_forward):
        monkeypatch.setattr(module, "loading_turn", turn)
        note(module, "open_model")
        note(module, "open_runner")
    expected = [("begins", ["cpu"]), ("gpu", 0, 0), "open_model", "open_runner", "ends"]
    for load in (
        lambda progress: open_model_runtime(model, HALF, max_rows_per_step=16, on_rank_lost=print, progress=progress),
        lambda progress: model_forward.open_draft_model(model, HALF, progress=progress),
    ):
        stages.clear()
        load(lambda *stage: stages.append(stage) if stage[0] == "gpu" else None)
        assert stages == expected


def test_a_rehearsal_has_as_many_logits_as_a_step_may_have(model, monkeypatch):
    """In a decode node these are all rows, including drafts; in a prefill node, rows of prompts that are scored."""
    opened = []

    def noted(*arguments, num_rows, num_logits, **keywords):
        opened.append((num_rows, num_logits))
        return open_runner(*arguments, num_rows=num_rows, num_logits=num_logits, **keywords)

    monkeypatch.setattr(compute_module, "open_runner", noted)
    for max_rows_per_step in (600, None):
        open_model_runtime(model, HALF, max_rows_per_step=max_rows_per_step, on_rank_lost=print)
    assert opened == [(600, 600), (256, 32)]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_window_that_memory_does_not_hold_is_shortened_unless_it_is_wanted(tmp_path, capsys, is_wanted):
    """The shortened window is the one that the node publishes, and that its runner and a draft model use."""
    path = make_tiny_model(tmp_path / "model", seed=5, overrides={"max_position_embeddings": 8192})
    config = ModelConfig(id=str(path), kernels="torch", num_threads=1, max_model_len=8192 * is_wanted)
    kv_cache = KVCacheConfig(num_blocks=200)
    if is_wanted:
        with pytest.raises(
            ConfigError, match=r"one window of 8192 tokens needs .*, or model\.max_model_len to 3200 or"
        ):
            open_model_runtime(config, kv_cache, max_rows_per_step=16, on_rank_lost=print)
        return
    compute = open_model_runtime(config, kv_cache, max_rows_per_step=16, on_rank_lost=print)
    assert (compute.model.info.max_model_len, compute.model.spec.max_model_len) == (3072, 3072)
    assert compute.describe(config, cpu_turns=open_turns("", None, cpus=()))["max_model_len"] == 3072
    assert capsys.readouterr().err.count("at most 3072. Set model.max_model_len, or give more memory") == 1
    drafter = make_proposer("draft_model", ProposerSettings(model=config, kv_cache=kv_cache))
    assert drafter._forward.max_model_len == 3072


def test_a_decode_nodes_cache_leaves_room_for_its_proposer(model):
    nodes = [TinyNode(model.id, kv_cache=HALF, local_lookup=fallback) for fallback in ("none", "ngram")]
    without, beside = (node.parts.description["kv_blocks"] for node in nodes)
    assert beside / without == pytest.approx(1 - MAX_INDEX_BYTES / FREE_BYTES, rel=0.01)


def test_a_draft_models_cache_leaves_room_for_what_the_node_holds(model):
    settings = ProposerSettings(model=model, kv_cache=HALF, other_memory_bytes=OTHER_BYTES)
    memory_bytes = make_proposer("draft_model", settings).info.memory_bytes
    assert memory_bytes == pytest.approx((FREE_BYTES - OTHER_BYTES) / 2, rel=0.01)
