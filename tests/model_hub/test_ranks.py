"""A model on two ranks, which are real processes with gloo on the CPU, compared with the same model on one."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import torch

from outrider.constraints.grammar import NUMERICS
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.group import Member
from outrider.errors import ConfigError, ModelError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.model_hub import ranks
from outrider.model_hub.compute import ModelRuntime, open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.ranks import open_ranks
from prefill_node.push import KvPush
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.tiny_model import make_tiny_model

RANKS_ON_CPU = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None,
    reason="transformers splits a model over what torch was built for, which is no CPU",
)
BLOCK_SIZE = 4
PROMPT = [3 + (7 * n) % 290 for n in range(41)]
CHUNKS = [(0, 16), (16, 32), (32, len(PROMPT) - 1)]
TABLE, OTHER_TABLE, THIRD_TABLE = [9, 2, 17, 30, 4, 21, 8, 0, 13, 26, 11, 5], list(range(31, 43)), list(range(43, 55))
PATIENCE_SECONDS = 60.0
FEATURES = FeatureReduction(taps=(2, 3), hidden_size=64, takes_final_norm=True)


KV_CACHE = KVCacheConfig(num_blocks=64, block_size=BLOCK_SIZE)
SETTINGS = {"num_threads": 1, "max_model_len": 128}


def open_one(path, *, features=None, **settings):
    config = ModelConfig(id=str(path), kernels="torch", **SETTINGS, **settings)
    return open_model_runtime(config, KV_CACHE, max_rows_per_step=64, features=features, on_rank_lost=print)


def open_two(path, on_rank_lost, *, num_ranks=2, timeout_seconds=PATIENCE_SECONDS, features=None, **settings):
    config = ModelConfig(id=str(path), tensor_parallel_size=num_ranks, **SETTINGS, **settings)
    parts = open_ranks(
        config,
        KV_CACHE,
        max_rows_per_step=64,
        features=features,
        on_rank_lost=on_rank_lost,
        timeout_seconds=timeout_seconds,
    )
    return ModelRuntime(*parts, max_rows_per_step=64, adapters=None)


def make_model(tmp_path):
    return make_tiny_model(tmp_path / "model", seed=5, overrides={"tie_word_embeddings": True})


def forward(compute, *rows):
    return compute.runner.forward(build_input_batch(rows, BLOCK_SIZE)).clone()


def run(compute):
    """Returns the logits of a prompt in chunks, of greedy steps and of verification steps, and the greedy tokens."""
    logits, tokens = [], list(PROMPT)
    for start, end in CHUNKS:
        logits.append(forward(compute, SequenceRows(PROMPT[start:end], start, TABLE, end - start)))
    assert forward(compute, SequenceRows(PROMPT[:9], 0, OTHER_TABLE, 0)).shape[0] == 0
    for _ in range(4):
        logits.append(forward(compute, SequenceRows(tokens[-1:], len(tokens) - 1, TABLE, 1)))
        tokens.append(int(logits[-1].argmax()))
    compute.kv_cache.copy_blocks([(31, 43), (32, 44), (33, 45)])
    rows = [
        SequenceRows([tokens[-1], 5, 6, 7], len(tokens) - 1, TABLE, 4),
        SequenceRows([11, 12, 13], 9, OTHER_TABLE, 3),
        SequenceRows([11, 21, 12, 22], 9, THIRD_TABLE, 4, parents=(-1, -1, 1)),
    ]
    logits.append(forward(compute, *rows))
    compute.kv_cache.move_slots([(45 * BLOCK_SIZE + 3, 45 * BLOCK_SIZE + 2)])
    logits.append(forward(compute, SequenceRows([31], 11, THIRD_TABLE, 1)))
    return torch.cat(logits), tokens


def features_of(compute):
    """Returns the features of the prompt's tokens."""
    slots = slots_of(TABLE, len(PROMPT) - 1, BLOCK_SIZE)
    return compute.kv_cache.read(FEATURES.plane_name, range(1), slots).view(np.float32)


def push(source, destination, table, *, max_frame_bytes=700):
    """Pushes the KV of the prompt, without its last token, like a prefill node to a decode node."""
    ended, failed = queue.SimpleQueue(), []
    inbox = TransferInbox(
        incarnation=bytes(16), on_complete=lambda *_: None, on_failed=lambda _, reason: failed.append(reason)
    )
    spec = TransferSpec(
        transfer_id=os.urandom(16),
        incarnation=bytes(16),
        start_token=0,
        end_token=len(PROMPT) - 1,
        planes=destination.kv_cache.planes,
    )
    inbox.open(spec, ReservedBlocks(destination.kv_cache, table))
    kv_push = KvPush(
        connector=InMemoryConnector({"decode": inbox}, max_frame_bytes=max_frame_bytes),
        kv_cache=source.kv_cache,
        address="decode",
        spec=spec,
        block_ids=TABLE,
        on_ended=ended.put,
    )
    kv_push.start()
    for start, end in CHUNKS:
        source.runner.forward(
            build_input_batch([SequenceRows(PROMPT[start:end], start, TABLE, 0)], BLOCK_SIZE),
            on_layer_done=lambda layer, start=start, end=end: kv_push.offer(range(layer, layer + 1), start, end),
        )
        kv_push.offer(None, start, end)
    kv_push.finish()
    outcome = ended.get(timeout=PATIENCE_SECONDS)
    assert (outcome.error, failed) == (None, [])
    for plane in spec.planes:
        layers = range(plane.num_layers)
        sent = source.kv_cache.read(plane.name, layers, slots_of(TABLE, len(PROMPT) - 1, BLOCK_SIZE))
        came = destination.kv_cache.read(plane.name, layers, slots_of(table, len(PROMPT) - 1, BLOCK_SIZE))
        assert np.array_equal(sent, came)


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

        assert lost.empty()
        process = two.ranks.members[0].process
        process.kill()
        with pytest.raises(RankLostError, match=r"rank 1 .* ended with status -9"):
            forward(two, SequenceRows(PROMPT[-1:], len(PROMPT) - 1, TABLE, 1))
        assert "status -9" in str(lost.get(timeout=PATIENCE_SECONDS))
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
    process = two.ranks.members[0].process
    try:
        with two.ranks:
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                forward(two, SequenceRows(PROMPT[:5], 0, TABLE, 1))
            assert time.monotonic() - started < PATIENCE_SECONDS
            with pytest.raises(RankLostError, match="rank 1 sends nothing"):
                two.kv_cache.read("k", range(1), np.array([0]))
    finally:
        assert process.poll() == -9


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
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        self.far_ends += theirs
        channels = [Channel(end, peer=f"rank {rank}", timeout_seconds=timeout_seconds) for end in ours]
        return Member(rank, self.processes[-1], *channels)


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
