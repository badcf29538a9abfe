"""Models with experts on two and three ranks, which are real processes, compared to the bit with one process."""

from __future__ import annotations

import queue

import pytest
import torch

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.ranks.channel import RankLostError
from outrider.errors import ConfigError
from outrider.model_hub.compute import ModelRuntime, open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.ranks import open_ranks
from tests.support.rank_runs import (
    BLOCK_SIZE,
    CHUNKS,
    OTHER_TABLE,
    PATIENCE_SECONDS,
    PROMPT,
    TABLE,
    THIRD_TABLE,
    forward,
    push,
    run,
)
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")

NUM_BLOCKS = 64
KV_CACHE = KVCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def open_experts(path, num_ranks, on_rank_lost=print, **settings):
    named = {"id": str(path), "num_threads": 1, "max_model_len": 128, "expert_parallel_size": num_ranks}
    config = ModelConfig(**{**named, **settings})
    if num_ranks == 1:
        return open_model_runtime(config, KV_CACHE, max_rows_per_step=64, on_rank_lost=on_rank_lost)
    parts = open_ranks(
        config, KV_CACHE, max_rows_per_step=64, on_rank_lost=on_rank_lost, timeout_seconds=PATIENCE_SECONDS
    )
    return ModelRuntime(*parts, max_rows_per_step=64, adapters=None)


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
    ("num_ranks", "architecture", "overrides"),
    [
        (2, "mixtral", EXPERTS),
        (3, "deepseek_v3", {"n_shared_experts": 1}),
        (2, "qwen3_moe", EXPERTS),
    ],
)
def test_ranks_compute_and_hand_over_what_one_process_does_until_one_is_killed(
    tmp_path, num_ranks, architecture, overrides
):
    """This is one test because starting a rank takes seconds."""
    path = make_tiny_model(tmp_path / "model", seed=5, architecture=architecture, dtype="bfloat16", overrides=overrides)
    lost = queue.SimpleQueue()
    one, several = (open_experts(path, n, lost.put) for n in (1, num_ranks))
    with several.ranks:
        assert several.model.info == one.model.info
        expected, tokens = run(one)
        found, found_tokens = run(several)
        assert torch.equal(found, expected)
        assert found_tokens == tokens
        last = num_ranks - 1
        assert torch.equal(steps(several, 0, last, 0), steps(one, 0, 0, 0))
        assert torch.equal(steps(several, last, last, last), steps(one, 0, 0, 0))
        several.ranks.members[0].process.kill()
        with pytest.raises(RankLostError, match=r"rank 1 .* ended with status -9"):
            forward(several, SequenceRows(PROMPT[-1:], len(PROMPT) - 1, TABLE, 1))
