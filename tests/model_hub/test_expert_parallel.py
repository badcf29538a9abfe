"""Models with experts on two and three ranks, which are real processes, compared to the bit with one process."""

from __future__ import annotations

import queue

import pytest
import torch

from outrider.engine import data_parallel
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
from tests.support.rank_runs import (
    BLOCK_SIZE,
    CHUNKS,
    KV_CACHE,
    NUM_BLOCKS,
    OTHER_TABLE,
    PROMPT,
    TABLE,
    THIRD_TABLE,
    assert_that_a_hang_ends_the_step,
    assert_that_a_kill_ends_the_step,
    forward,
    open_divided,
    push,
    run,
)
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")

EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def open_experts(path, num_ranks, *arguments, **settings):
    return open_divided(path, *arguments, **{"expert_parallel_size": num_ranks, **settings})


def on_rank(rank, table):
    return [rank * NUM_BLOCKS + block for block in table]


def steps(compute, *ranks):
    """Returns the logits of three sequences, which are on these ranks: prompts, greedy steps and drafts, also trees."""
    tables = [on_rank(rank, table) for rank, table in zip(ranks, (TABLE, OTHER_TABLE, THIRD_TABLE), strict=True)]
    logits = []
    for start, end in CHUNKS:
        rows = [SequenceRows(PROMPT[start:end], start, table, at) for at, table in enumerate(tables)]
        logits.append(forward(compute, *rows))
    logits.append(forward(compute, *(SequenceRows(PROMPT[-1:], len(PROMPT) - 1, table, 1) for table in tables)))
    drafts = SequenceRows([31, 5, 6, 7], 41, tables[0], 4), SequenceRows([31, 5, 6, 7], 41, tables[1], 4, (-1, -1, 1))
    logits.append(forward(compute, *drafts, SequenceRows([11, 12], 41, tables[2], 0)))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("num_ranks", "architecture", "overrides", "dtype"),
    [
        (2, "deepseek_v3", {"n_shared_experts": 1, "n_routed_experts": 5, "n_group": 1}, "bfloat16"),
        pytest.param(3, "mixtral", EXPERTS, "bfloat16", marks=pytest.mark.full),
        pytest.param(2, "qwen3_moe", EXPERTS, "float32", marks=pytest.mark.full),
    ],
)
def test_ranks_compute_and_hand_over_what_one_process_does_until_one_is_killed(
    tmp_path, monkeypatch, num_ranks, architecture, overrides, dtype
):
    """This is one test because starting a rank takes seconds."""
    monkeypatch.setattr(data_parallel, "RENEWAL_STEPS", 2)
    path = make_tiny_model(tmp_path / "model", seed=5, architecture=architecture, dtype=dtype, overrides=overrides)
    lost, last = queue.SimpleQueue(), num_ranks - 1
    one, several = (
        open_experts(path, n, lost.put, num_redundant_experts=num_ranks if n > 1 else 0) for n in (1, num_ranks)
    )
    with several.ranks:
        assert several.model.info == one.model.info
        assert several.kv_cache.planes == one.kv_cache.planes
        assert several.kv_cache.num_blocks == num_ranks * NUM_BLOCKS
        pool = several.make_pool(KV_CACHE)
        assert (pool.num_blocks, pool.num_blocks_together) == (num_ranks * NUM_BLOCKS, NUM_BLOCKS)
        expected, tokens = run(one)
        found, found_tokens = run(several)  # all on rank 0
        assert torch.equal(found, expected)
        assert found_tokens == tokens
        expected = steps(one, 0, 0, 0)
        for ranks in ((0, last, 0), (last, last, last), (last, 0, 1)):
            assert torch.equal(steps(several, *ranks), expected)
        load = several.runner.rank_load
        assert load.num_expert_copies > 0
        assert load.expert_balance >= 1.0
        assert min(load.rows_by_rank) > 0
        # KV is pushed in both directions, byte for byte, and the receiver continues from it.
        row = PROMPT[-1:], len(PROMPT) - 1
        logits = forward(one, SequenceRows(*row, TABLE, 1))
        there, table = on_rank(last, OTHER_TABLE), on_rank(1, TABLE)
        for source, destination, to, of in (
            (one, several, there, TABLE), (several, one, OTHER_TABLE, table), (several, several, there, table),
        ):  # fmt: skip
            push(source, destination, to, source_table=of)
            assert torch.equal(forward(destination, SequenceRows(*row, to, 1)), logits)
        assert_that_a_kill_ends_the_step(several, lost)


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_step_in_bounded_time(tmp_path):
    path = make_tiny_model(tmp_path / "model", architecture="mixtral", overrides=EXPERTS)
    two = open_experts(path, 2, timeout_seconds=5.0)
    assert_that_a_hang_ends_the_step(two, slot=NUM_BLOCKS * BLOCK_SIZE)


def test_settings_that_do_not_go_together_are_refused_before_anything_is_started(tmp_path):
    path = make_tiny_model(tmp_path / "model", architecture="mixtral", overrides=EXPERTS)

    def refusal(**settings):
        with pytest.raises(ConfigError) as caught:
            open_experts(path, 2, **settings)
        return caught.value.message

    assert "is more than the 5 experts of mixtral" in refusal(expert_parallel_size=6)
    assert "does not go with model.tensor_parallel_size 2" in refusal(tensor_parallel_size=2)
    assert "does not go with model.pipeline_parallel_size 2" in refusal(pipeline_parallel_size=2)
    dense = make_tiny_model(tmp_path / "dense")
    assert "is more than the 0 experts of llama" in refusal(id=str(dense))
    with pytest.raises(ValueError, match="must be a multiple of expert_parallel_size"):
        ModelConfig(expert_parallel_size=2, num_redundant_experts=3)
    named = ModelConfig(id=str(path), expert_parallel_size=2)
    with pytest.raises(ConfigError, match=r"kv_cache\.host_memory does not go with model\.expert_parallel_size"):
        open_model_runtime(named, KVCacheConfig(host_memory="1GiB"), on_rank_lost=print)
    with pytest.raises(ConfigError, match="only prefill and decode nodes"):
        open_model(named)
