"""Times the decode node's own loop on a GPU, without sockets: each step with all of the host's work before the next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.host_gap import RunningLoop
from checks.gpu_floor import Code, Machine, Sizes, floor_ms, predict
from checks.gpu_stages.day import Day
from checks.gpu_stages.engine import OpenEngine
from checks.gpu_stages.kernel_spans import busy_and_pauses, kernel_spans
from outrider.engine.engine import Engine
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.scheduler import Scheduler

NUM_WARM_UP_STEPS = 20
NUM_STEPS = 60
NUM_PROFILED_STEPS = 10
MIN_BUSY = 0.9
"""Minimum share of a step's time during which the GPU must compute."""


def measure_loop(
    day: Day, engine: OpenEngine, batches: Sequence[int], *, context: int, sizes: Sizes, bandwidth: float
) -> None:
    """Measures plain decoding with each number of sequences, in ascending order, at temperature 0.8."""
    cache = engine.cache
    pool = BlockPool(num_blocks=cache.num_blocks, block_size=cache.block_size, hash_seed=b"")
    steps_of_each = NUM_WARM_UP_STEPS + NUM_STEPS + NUM_PROFILED_STEPS
    most = batches[-1]
    loop = RunningLoop(
        Engine(
            pool=pool,
            scheduler=Scheduler(pool, max_running=most, max_rows_per_step=256),
            kv_cache=cache,
            runner=engine.runner,
            sampler=engine.loaded.open_sampler(),
        ),
        context=context,
        max_tokens=len(batches) * steps_of_each + 2 * most * -(-context // 256),  # enough for steps with prompts, too
        max_sequences=most,
    )
    for num_seqs in batches:
        started = time.monotonic()
        loop.grow(num_seqs, temperature=0.8)
        prompts_seconds = time.monotonic() - started
        times: list[float] = []
        parts: list[Mapping[str, int]] = []
        for _ in range(NUM_WARM_UP_STEPS + NUM_STEPS):
            started = time.perf_counter()
            loop.step()
            times.append(time.perf_counter() - started)
            parts.append(loop.nanoseconds)
        ms = 1e3 * median(times[NUM_WARM_UP_STEPS:])
        floor = floor_ms(sizes, num_seqs, context, bandwidth)
        expected = predict(sizes, num_seqs, context, machine=Machine(bytes_per_second=bandwidth), code=Code())
        busy = pause_ms = None
        if day.is_gpu:  # the profiler slows the host down, so the share is relative to an unprofiled step
            busy_us, pauses_us = busy_and_pauses([span[:2] for span in kernel_spans(loop.step, NUM_PROFILED_STEPS)])
            busy = round(1e-3 * busy_us / NUM_PROFILED_STEPS / ms, 3)
            pause_ms = round(1e-3 * median(sorted(pauses_us)[1 - NUM_PROFILED_STEPS :]), 3)  # between two steps
        day.tell(
            "loop",
            seqs=num_seqs,
            context=context,
            ms=round(ms, 3),
            mean_ms=round(1e3 * sum(times[NUM_WARM_UP_STEPS:]) / NUM_STEPS, 3),
            floor_ms=round(floor, 3),
            times_floor=round(ms / floor, 2),
            predicted_ms=round(expected.total, 2) if day.is_gpu else None,
            tokens_per_second=round(1e3 * num_seqs / ms),
            busy=busy,
            pause_ms=pause_ms,
            parts_ms={  # of the engine thread; sampling waits for the GPU, and forward launches
                part: round(1e-6 * median(each.get(part, 0) for each in parts[NUM_WARM_UP_STEPS:]), 3)
                for part in parts[-1]
            },
            prompts_seconds=round(prompts_seconds, 1),
        )
        if busy is not None:
            day.expect(f"the GPU computes for {MIN_BUSY:.0%} of the time with {num_seqs} sequences", busy >= MIN_BUSY)
