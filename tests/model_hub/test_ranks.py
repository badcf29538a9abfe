"""A model on two ranks, which are real processes with gloo on the CPU, compared with the same model on one."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch

from outrider.constraints.grammar import NUMERICS
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.ranks.channel import Channel
from outrider.engine.ranks.group import Member
from outrider.errors import ConfigError, ModelError
from outrider.model_hub import ranks
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import ModelConfig
from tests.support.rank_runs import (
    FEATURES,
    OTHER_TABLE,
    PATIENCE_SECONDS,
    PROMPT,
    TABLE,
    assert_that_a_hang_ends_the_step,
    assert_that_a_kill_ends_the_step,
    features_of,
    forward,
    open_divided,
    push,
    run,
)
from tests.support.tiny_model import make_tiny_model

RANKS_ON_CPU = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None,
    reason="transformers splits a model over what torch was built for, which is no CPU",
)


def open_one(path, **settings):
    return open_divided(path, kernels="torch", **settings)


def open_two(path, on_rank_lost, *, num_ranks=2, **settings):
    return open_divided(path, on_rank_lost, tensor_parallel_size=num_ranks, **settings)


def make_model(tmp_path):
    return make_tiny_model(tmp_path / "model", seed=5, overrides={"tie_word_embeddings": True})


@RANKS_ON_CPU
def test_two_ranks_compute_and_hand_over_what_one_does_until_one_is_killed(tmp_path, monkeypatch):
    """This is one test because starting a rank takes seconds."""
    path, lost = make_model(tmp_path), queue.SimpleQueue()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    one, two = (
        open_one(path, features=lambda _: FEATURES),
        open_two(path, lost.put, features=lambda _: FEATURES),
    )
    with two.ranks:
        assert two.model.spec.num_kv_heads == 1
        assert two.kv_cache.planes == one.kv_cache.planes
        assert two.kv_cache.num_blocks == one.kv_cache.num_blocks == 64
        assert two.model.info.fingerprint == one.model.info.fingerprint
        assert two.model.info.numerics == f"exact up to ties (torch float32, 2 ranks, {NUMERICS})"

        (logits, tokens), (expected, expected_tokens) = run(two), run(one)
        assert tokens == expected_tokens
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        features, expected = (features_of(each) for each in (two, one))
        assert np.abs(features - expected).max() < 1e-4 * np.abs(expected).max()

        # KV is pushed in both directions, byte for byte, and the receiver continues from it.
        for source, destination in ((two, one), (one, two), (two, two)):
            push(source, destination, OTHER_TABLE)
            row = SequenceRows(PROMPT[-1:], len(PROMPT) - 1, OTHER_TABLE, 1)
            assert int(forward(destination, row).argmax()) == tokens[len(PROMPT)]

        assert_that_a_kill_ends_the_step(two, lost)
        assert not list(temporary.iterdir()), "the process ends here, and nothing is removed any more"


@RANKS_ON_CPU
@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((name, "float32") for name in ("qwen2", "qwen3", "mistral", "gemma2", "granite_swa", "mixtral", "glm4_moe")),
        ("llama", "bfloat16"),
    ],
)
def test_plans_of_other_families_compute_the_same_too(tmp_path, architecture, dtype):
    """They have norms of heads, biases, windows, soft caps, sinks, experts, and a dtype in which sums are rounded."""
    path = make_tiny_model(tmp_path / "model", seed=5, architecture=architecture)
    one, two = open_one(path, dtype=dtype), open_two(path, print, dtype=dtype)
    rows = SequenceRows(PROMPT, 0, TABLE, len(PROMPT))
    with two.ranks:
        logits, expected = forward(two, rows), forward(one, rows)
        allowed = 1e-4 if dtype == "float32" else 0.05
        assert (logits - expected).abs().max() < allowed * expected.abs().max()
        push(two, one, OTHER_TABLE)


@RANKS_ON_CPU
@pytest.mark.full
def test_a_rank_that_hangs_ends_the_step_in_bounded_time(tmp_path):
    two = open_two(make_model(tmp_path), print, timeout_seconds=5.0)
    assert_that_a_hang_ends_the_step(two, slot=0)


def test_settings_that_do_not_go_together_are_refused_before_anything_is_started(tmp_path):
    path = make_tiny_model(tmp_path / "model")

    def refusal(**settings):
        with pytest.raises(ConfigError) as caught:
            open_model_runtime(
                ModelConfig(**{"id": str(path), "tensor_parallel_size": 2, "device": "cpu", **settings}),
                KVCacheConfig(),
                max_rows_per_step=64,
                on_rank_lost=print,
            )
        return caught.value.message

    assert "does not divide the model's 4 attention heads" in refusal(tensor_parallel_size=3)
    assert "does not divide the model's 2 KV heads" in refusal(tensor_parallel_size=4)
    assert "model.kernels portable" in refusal(kernels="portable")
    assert "model.weights int8" in refusal(weights="int8")
    assert "model.deterministic" in refusal(deterministic=True)
    latent = make_tiny_model(tmp_path / "latent", architecture="deepseek_v3")
    assert "all heads of latent attention (deepseek_v3) share" in refusal(id=str(latent))
    assert "no tensor-parallel plan for gpt2" in refusal(id=str(make_gpt2(tmp_path / "gpt2")))


def make_gpt2(path):
    """Writes only a configuration, which is enough because nothing is loaded."""
    from transformers import GPT2Config

    GPT2Config().save_pretrained(path)
    return path


def test_a_process_alone_loads_no_shard(tmp_path):
    """An example is a draft node, which does not start ranks."""
    from outrider.model_hub.open import open_model

    path = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="only prefill and decode nodes"):
        open_model(ModelConfig(id=str(path), tensor_parallel_size=2))


class StartUp:
    """Replaces the processes of ranks from 1 on. Each ends at once with status 1, like a rank that fails."""

    def __init__(self, tmp_path, monkeypatch):
        self.processes, self.far_ends, self.temporary = [], [], tmp_path / "temporary"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setattr(ranks, "_spawn", self.spawn)

    def spawn(self, rank, *, timeout_seconds):
        self.processes.append(subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"]))
        ours, theirs = zip(*[socket.socketpair() for _ in range(3)], strict=True)
        self.far_ends += theirs
        channels = [Channel(end, peer=f"rank {rank}", timeout_seconds=timeout_seconds) for end in ours[:2]]
        return Member(rank, self.processes[-1], *channels, ours[2])


@RANKS_ON_CPU
def test_a_model_that_no_rank_can_load_is_named_though_other_ranks_have_ended(tmp_path, monkeypatch):
    start_up = StartUp(tmp_path, monkeypatch)

    def refuse(*_args, **_named):
        start_up.processes[0].wait(PATIENCE_SECONDS)
        raise ModelError("a weight file is damaged")

    monkeypatch.setattr(ranks, "_receive", lambda *_: [])
    monkeypatch.setattr(ranks, "open_shard", refuse)
    with pytest.raises(ModelError, match="a weight file is damaged"):
        open_two(make_model(tmp_path), print)
    assert not list(start_up.temporary.iterdir())


@RANKS_ON_CPU
def test_a_rank_that_cannot_be_started_leaves_none_of_the_others(tmp_path, monkeypatch):
    start_up = StartUp(tmp_path, monkeypatch)

    def spawn(rank, **named):
        if rank == 2:
            raise OSError("too many processes")
        return start_up.spawn(rank, **named)

    monkeypatch.setattr(ranks, "_spawn", spawn)
    model = make_tiny_model(tmp_path / "model", overrides={"num_key_value_heads": 4})
    with pytest.raises(OSError, match="too many processes"):
        open_two(model, print, num_ranks=4)
    assert start_up.processes[0].returncode is not None
    assert not list(start_up.temporary.iterdir())
