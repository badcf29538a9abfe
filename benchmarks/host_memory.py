"""Seconds to resume a preempted sequence by loading its KV from main memory, and by computing it again, in turns.

    python -m benchmarks.host_memory --tokens 1000 --rounds 9

Resuming is everything from planning to the logits of the next token, which must be the same bits both ways. The block
that is not full is computed either way.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.scheduler import EngineSequence, Scheduler, StepReservation
from outrider.engine_node import end_process
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL_ID)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    config = KVCacheConfig(memory="1GiB", host_memory="1GiB")
    runtime = open_model_runtime(ModelConfig(id=arguments.model), config, on_rank_lost=end_process)
    pool = runtime.make_pool(config)
    host = pool.host
    assert host is not None
    print(f"prices of a block at start: {host.price}")
    scheduler = Scheduler(pool, max_running=4, max_rows_per_step=runtime.max_rows_per_step)
    engine = PromptEngine(pool, scheduler, runtime.kv_cache, runtime.runner)
    token_ids = [(7 * index) % 40_000 + 20 for index in range(arguments.tokens)]
    seconds: dict[str, list[float]] = {"loaded": [], "computed": []}
    for number in range(arguments.rounds + 1):
        for name, used in (("loaded", host), ("computed", None)):
            pool.host = host
            sequence = EngineSequence(key=number, token_ids=list(token_ids))
            scheduler.add(sequence)
            expected, _ = run(engine, sequence)
            scheduler._preempt(sequence, StepReservation())  # noqa: SLF001 what a full pool would cause
            pool.release(pool.allocate(pool.num_free_blocks))  # evicts all blocks
            pool.host = used
            logits, elapsed = run(engine, sequence)
            assert np.array_equal(logits, expected)
            if number:  # the first round is a warm-up
                seconds[name].append(elapsed)
            scheduler.remove(sequence)
            pool.release(pool.allocate(pool.num_free_blocks))
    for name, times in seconds.items():
        print(f"{name}: {median(times) * 1e3:.1f} ms (from {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})")
    print(f"ratio: {median(seconds['loaded']) / median(seconds['computed']):.4f}")
    print(f"prices of a block at the end: {host.price}")


def run(engine: PromptEngine, sequence: EngineSequence) -> tuple[np.ndarray, float]:
    """Runs steps until all tokens are computed, and returns the last logits and the seconds."""
    started, logits = time.perf_counter(), np.empty(0)
    while sequence.num_uncomputed:
        plan = engine.scheduler.plan()
        (item,) = plan.scheduled
        kv, start = sequence.kv, sequence.num_computed
        assert kv is not None
        rows = SequenceRows(
            sequence.token_ids[start : start + item.num_rows],
            start,
            kv.block_table(),
            int(item.reaches_end),
            window_tables=kv.window_tables(),
        )
        logits = engine.forward(plan.block_copies, [rows])
        kv.advance(start + item.num_rows)
    return logits, time.perf_counter() - started


if __name__ == "__main__":
    main()
