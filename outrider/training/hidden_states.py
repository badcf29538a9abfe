"""Phase 2: computes the target's hidden states at every token of the chosen texts, with the runner that serves it."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.engine.device import device_type
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.state_table import StateSteps
from outrider.engine.processor import usable_cpus, within_quota
from outrider.errors import InternalError
from outrider.heads.checkpoint import Target
from outrider.model_hub.compute import PROMPT_ROWS, ModelRuntime, open_model_runtime
from outrider.training.dataset import Dataset
from outrider.training.plan import PhaseClock, Progress, TrainingPlan

if TYPE_CHECKING:
    from outrider.engine.ranks.channel import RankLostError

CLIENTS = (1, 4, 16)
MAX_DRAFT_TOKENS = 5
CONTEXT_TOKENS = 256  # tokens before the timed rows: about a prompt and half an answer
FLUSHED_BYTES = 128 << 20
MIN_TIMED_CALLS = 5


@contextmanager
def opened_target(plan: TrainingPlan, target: Target, taps: tuple[int, ...]) -> Iterator[ModelRuntime]:
    """Opens the target with a KV cache that also keeps the hidden states of `taps` and the final ones.

    Gives all processors back to torch afterwards. Raises: as `open_model_runtime`.
    """

    def on_rank_lost(error: RankLostError) -> None:
        raise InternalError(f"a rank of the target was lost: {error}; run the same command again") from error

    identity = FeatureReduction(taps=(*taps, target.num_layers), hidden_size=target.hidden_size, takes_final_norm=True)
    runtime = open_model_runtime(
        plan.model,
        KVCacheConfig(),
        max_rows_per_step=plan.max_length,
        features=lambda _: identity,
        on_rank_lost=on_rank_lost,
    )
    with runtime.ranks:
        yield runtime
    torch.set_num_threads(len(within_quota(usable_cpus())))  # loading a model may have limited torch to one thread
    gc.collect()


def write_hidden_states(
    target: ModelRuntime, dataset: Dataset, shard: int, clock: PhaseClock, *, seconds: float, progress: Progress
) -> None:
    """Appends to the shard's file until it has all texts of the shard.

    Ends earlier if there are enough texts and the phase has taken `seconds`.
    """
    cache, texts, starts = target.kv_cache, dataset.shards[shard], dataset.starts
    plane = target.model.spec.features
    assert plane is not None
    max_rows = min(PROMPT_ROWS[device_type(target.model.device)], target.max_rows_per_step)
    start, enough = texts.start + dataset.num_done(shard), 2 * dataset.num_held_out
    with dataset.path(shard).open("ab") as file:
        os.ftruncate(file.fileno(), int(starts[start] - starts[texts.start]) * dataset.row_bytes)
        while start < texts.stop and (clock.seconds <= seconds or start <= enough):
            end = start + 1
            while end < texts.stop and starts[end + 1] - starts[start] <= max_rows:
                end += 1
            rows, slots, num_blocks = [], [], 0
            for text in range(start, end):
                token_ids = dataset.token_ids(text).tolist()
                blocks = range(num_blocks, num_blocks - (-len(token_ids) // cache.block_size))
                rows.append(SequenceRows(token_ids, 0, blocks, num_logits=0))
                slots.append(np.arange(len(token_ids)) + blocks.start * cache.block_size)
                num_blocks = blocks.stop
            target.runner.forward(build_input_batch(rows, cache.block_size))
            file.write(cache.read(plane.name, range(1), np.concatenate(slots)).data)
            start = end
            clock.keep()
            progress("features, thousand tokens", int(starts[start]) // 1000, int(starts[-1]) // 1000)


def measure_rows(target: ModelRuntime, *, limit_seconds: float) -> list[list[float]]:
    """Returns, for each number of CLIENTS, the seconds of a step's forward with 1, 2, … rows per client.

    One row is plain decoding; each further row is a draft token. The processor's caches are flushed before each
    forward. The first blocks of the KV cache are overwritten. `limit_seconds`: the time for each measurement.
    """
    cache, flush = target.kv_cache, cache_flush(target.model.device)
    size, num_blocks = cache.block_size, min((cache.num_blocks, *cache.window_blocks))
    states = StateSteps(CONTEXT_TOKENS, 0) if cache.state_slots else None
    per_text = -(-(CONTEXT_TOKENS + MAX_DRAFT_TOKENS + 1) // size)

    def seconds_of(clients: int, num_rows: int) -> float:
        rows = [
            SequenceRows(
                [0] * num_rows,
                CONTEXT_TOKENS,
                [block_id % num_blocks for block_id in range(first, first + per_text)],
                num_logits=num_rows,
                states=states,
            )
            for first in range(0, clients * per_text, per_text)
        ]
        batch = build_input_batch(rows, size)
        return median_seconds(
            lambda: torch.as_tensor(target.runner.forward(batch)).cpu(), flush, limit_seconds
        )  # `cpu` waits for the device

    return [[seconds_of(clients, num_rows) for num_rows in range(1, MAX_DRAFT_TOKENS + 2)] for clients in CLIENTS]


def cache_flush(device: torch.device | str) -> Callable[[], object]:
    """Returns a function that flushes a processor's caches: it reads more than they hold, and waits for the end."""
    unrelated = torch.ones(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    return lambda: unrelated.max().item()


def median_seconds(call: Callable[[], object], flush: Callable[[], object], limit_seconds: float) -> float:
    """Returns the median seconds of `call`. A `flush`, which is not timed, precedes each call.

    After one call as a warm-up, it times as many calls as fit into `limit_seconds`, but at least `MIN_TIMED_CALLS`.
    """
    call()
    times: list[float] = []
    until = time.monotonic() + limit_seconds
    while len(times) < MIN_TIMED_CALLS or time.monotonic() < until:
        flush()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
