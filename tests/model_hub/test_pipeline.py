"""A model on two and three stages, which are real processes, compared to the bit with the same model in one process."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest
import torch

from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.base import slots_of
from outrider.errors import ConfigError
from outrider.model_hub import ranks
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.open import open_model
from tests.support.rank_runs import (
    BLOCK_SIZE,
    KV_CACHE,
    OTHER_TABLE,
    PROMPT,
    assert_that_a_hang_ends_the_step,
    assert_that_a_kill_ends_the_step,
    forward,
    open_divided,
    push,
    run,
)
from tests.support.tiny_model import make_tiny_model

FEATURES = FeatureReduction(taps=(0, 1, 3), hidden_size=64, takes_final_norm=True)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Steps of a few rows are cut into parts."""
    monkeypatch.setattr(ranks, "OVERHEAD_ROWS", {"cpu": 2})


def open_stages(path, num_stages, *arguments, **settings):
    return open_divided(path, *arguments, pipeline_parallel_size=num_stages, **settings)


def everything_of(compute):
    """Returns all bytes of the blocks of `run` in the cache."""
    slots = slots_of(range(64), 64 * BLOCK_SIZE, BLOCK_SIZE)
    return [
        compute.kv_cache.read(plane.name, range(plane.num_layers), slots).tobytes() for plane in compute.kv_cache.planes
    ]


def assert_same(compute, expected):
    logits, tokens = run(compute)
    assert torch.equal(logits, expected[0])
    assert tokens == expected[1]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_compute_and_hand_over_what_one_process_does_until_one_is_killed(tmp_path, num_stages):
    """This is one test because starting a rank takes seconds."""
    path, lost = make_tiny_model(tmp_path / "model", seed=5, dtype="bfloat16"), queue.SimpleQueue()
    one, several = (open_stages(path, n, lost.put, features=lambda _: FEATURES) for n in (1, num_stages))
    with several.ranks:
        assert [each.model.spec.num_layers for each in (one, several)] == [3, 1]
        assert several.kv_cache.planes == one.kv_cache.planes
        assert several.kv_cache.num_blocks == one.kv_cache.num_blocks == 64
        assert several.model.info == replace(one.model.info, can_blend=False)
        expected = run(one)
        assert_same(several, expected)
        assert everything_of(several) == everything_of(one)
        # KV is pushed in both directions, byte for byte, and the receiver continues from it.
        row = SequenceRows(PROMPT[-1:], len(PROMPT) - 1, OTHER_TABLE, 1)
        for source, destination in ((one, several), (several, one), (several, several)):
            push(source, destination, OTHER_TABLE)
            assert torch.equal(forward(destination, row), expected[0][40:41])
        assert_that_a_kill_ends_the_step(several, lost)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gemma3_text", {"kernels": "torch", "dtype": "float32"}),
        ("gpt2", {"dtype": "bfloat16"}),
        pytest.param("deepseek_v3", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("gemma2", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("qwen3", {"weights": "int8"}, marks=pytest.mark.full),
        pytest.param("llama", {"kernels": "torch", "dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("gemma", {"kernels": "torch", "dtype": "float32"}, marks=pytest.mark.full),
    ],
)
def test_modules_and_other_families_compute_the_same(tmp_path, architecture, settings, monkeypatch):
    """They are computed by torch, by native layers, with latents, norms of a layer's outputs, or int8 weights."""
    if settings.get("kernels") == "torch":  # whose products depend on the other rows
        monkeypatch.setattr(ranks, "OVERHEAD_ROWS", {"cpu": 10_000})
    path = make_tiny_model(tmp_path / "model", seed=5, architecture=architecture)
    one, two = (open_stages(path, num_stages, **settings) for num_stages in (1, 2))
    with two.ranks:
        assert two.model.info == one.model.info
        assert_same(two, run(one))
        assert everything_of(two) == everything_of(one)


@pytest.mark.real_model
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_default_model_answers_the_same(num_stages):
    one, several = (open_stages(DEFAULT_MODEL_ID, n) for n in (1, num_stages))
    with several.ranks:
        assert_same(several, run(one))
        push(several, one, OTHER_TABLE, max_frame_bytes=1 << 17)


@pytest.mark.full
def test_a_stage_that_hangs_ends_the_step_in_bounded_time(tmp_path):
    two = open_stages(make_tiny_model(tmp_path / "model"), 2, timeout_seconds=5.0)
    assert_that_a_hang_ends_the_step(two, slot=0)


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    path = make_tiny_model(tmp_path / "model")

    def refusal(**settings):
        with pytest.raises(ConfigError) as caught:
            open_model_runtime(
                ModelConfig(**{"id": str(path), "pipeline_parallel_size": 2, "device": "cpu", **settings}),
                KV_CACHE,
                on_rank_lost=print,
                features=lambda _: FEATURES,
            )
        return caught.value.message

    assert refusal(pipeline_parallel_size=4) == "model.pipeline_parallel_size 4 is more than the model's 3 layers"
    assert "does not go with model.tensor_parallel_size 2" in refusal(tensor_parallel_size=2)
    assert "model.head needs a native decoder" in refusal(kernels="torch")


def test_a_process_alone_opens_no_stage(tmp_path):
    """An example is a draft node, which does not start ranks."""
    path = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="only prefill and decode nodes"):
        open_model(ModelConfig(id=str(path), pipeline_parallel_size=2))
