"""Steps of the 8B shape against the floor of their bytes: as graphs and without, where the time goes, and prompts.

A step is timed whole: batch, forward, race, and its tokens on the host. Then the decode node's loop runs such steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from checks.gpu_floor import Code, Machine, Sizes, floor_ms, predict
from checks.gpu_stages.day import SHAPES, WINDOW, Day
from checks.gpu_stages.engine import OpenEngine, open_engine, tables
from checks.gpu_stages.env import bytes_per_second
from checks.gpu_stages.loop import measure_loop
from outrider.engine.input_batch import SequenceRows
from outrider.engine.sampler import Sampler, SampleRows
from outrider.request import SamplingParams

SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95})
CHUNK = 32
"""Prompt tokens in a mixed step."""
SHOWN_KERNELS = 12


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `num_rows` of each sequence behind `context` tokens, and a chunk of one more prompt."""

    name: str
    num_seqs: int
    context: int
    num_rows: int = 1
    chunk: int = 0

    @property
    def max_tokens(self) -> int:
        return self.context + self.num_rows


def run(day: Day) -> None:
    path = day.model or day.random_model("8b" if day.is_gpu else "tiny")
    batches, context = ((1, 8, 32, 128), 512) if day.is_gpu else ((1, 4), 64)
    most = batches[-1]
    cases = [Case("decode", num_seqs, context) for num_seqs in batches]
    others = [
        Case("decode", most, 4 * context),
        Case("verify", batches[1], context, num_rows=5),
        Case("mixed", batches[-2], context, chunk=CHUNK),
    ]
    block_size = 16
    num_blocks = max((most + 1) * -(-(4 * context + CHUNK) // block_size), WINDOW // block_size)
    bandwidth = bytes_per_second(day.device)
    loaded = None
    for graphs in (True, False):
        started = time.monotonic()
        engine = open_engine(day, path, num_blocks=num_blocks, graphs=graphs, loaded=loaded)
        loaded = engine.loaded
        if day.is_gpu:
            engine.fill()
        day.tell("open", graphs=graphs, seconds=round(time.monotonic() - started, 1), model=loaded.info.name)
        steps = _Steps(day, engine, loaded.open_sampler(), _sizes(day, path), bandwidth, graphs=graphs)
        for sampling in SAMPLINGS:
            for case in (*cases, *(others if sampling is SAMPLINGS[0] else ())):
                steps.measure(case, sampling)
        if day.is_gpu:
            for case in (cases[0], cases[-1]):
                steps.profile(case)
        if graphs:
            measure_loop(day, engine, batches, context=context, sizes=steps.sizes, bandwidth=bandwidth)
        del engine, steps
        _empty_cache(day)
    _prompts(day, path, loaded, _sizes(day, path))


@dataclass(slots=True)
class _Steps:
    day: Day
    engine: OpenEngine
    sampler: Sampler
    sizes: Sizes
    bandwidth: float
    graphs: bool

    def measure(self, case: Case, sampling: dict[str, Any]) -> None:
        """The median of 30 steps, 8 without graphs and 3 on a CPU, after three that do not count."""
        step, times = self._step_of(case, sampling), []
        num_steps = 3 if not self.day.is_gpu else 30 if self.graphs else 8
        for _ in range(3 + num_steps):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        ms = 1e3 * median(times[3:])
        floor = floor_ms(self.sizes, case.num_seqs, case.context, self.bandwidth)
        expected = predict(
            self.sizes, case.num_seqs, case.context, machine=Machine(bytes_per_second=self.bandwidth), code=Code()
        )
        self.day.tell(
            "step",
            case=case.name,
            graphs=self.graphs,
            **sampling,
            seqs=case.num_seqs,
            context=case.context,
            ms=round(ms, 3),
            p90_ms=round(1e3 * sorted(times[3:])[int(0.9 * len(times[3:]))], 3),
            floor_ms=round(floor, 3),
            times_floor=round(ms / floor, 2),
            predicted_ms=round(expected.total, 2)
            if self.day.is_gpu and self.graphs and case.name == "decode"
            else None,
        )

    def profile(self, case: Case) -> None:
        """Which share of a step the device computes, in how many kernels, and which take longest."""
        import torch

        step = self._step_of(case, SAMPLINGS[0])
        step()
        num_steps = 5
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = time.perf_counter()
            for _ in range(num_steps):
                step()
            passed = time.perf_counter() - started
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        device_seconds = sum(event.self_device_time_total for event in events) * 1e-6
        self.day.tell(
            "profile",
            case=case.name,
            graphs=self.graphs,
            seqs=case.num_seqs,
            busy=round(device_seconds / passed, 3),
            host_gap_ms=round(1e3 * (passed - device_seconds) / num_steps, 3),
            kernels=sum(event.count for event in events if event.self_device_time_total) // num_steps,
            longest=[  # name, how often, µs a step
                (event.key[:48], event.count // num_steps, round(event.self_device_time_total / num_steps))
                for event in events[:SHOWN_KERNELS]
            ],
        )

    def _step_of(self, case: Case, sampling: dict[str, Any]) -> Callable[[], None]:
        state = self.sampler.start(SamplingParams(seed=1, max_tokens=64, **sampling), sample=0, prompt_token_ids=[1])
        places = list(tables(case.num_seqs + 1, case.max_tokens + CHUNK, self.engine.cache.block_size))
        tokens = list(range(5, 5 + case.num_rows))
        start = case.context - 1
        asked = [SampleRows(state, case.context, tuple(tokens[1:]))] * case.num_seqs

        def step() -> None:
            rows = [SequenceRows(tokens, start, table, len(tokens)) for table in places[:-1]]
            if case.chunk:
                rows.append(SequenceRows([9] * case.chunk, case.context - case.chunk, places[-1], 0))
            self.sampler.sample(self.engine.forward(rows), asked)

        return step


def _prompts(day: Day, path: Any, loaded: Any, sizes: Sizes) -> None:
    """Whole prompts, each in one forward; the host's part is the time until it is queued."""
    most = WINDOW - 16
    lengths: Sequence[int] = (64, 512, most) if day.is_gpu else (64,)
    engine = open_engine(day, path, num_blocks=WINDOW // 16, graphs=False, num_rows=lengths[-1], loaded=loaded)
    for length in lengths:
        rows = SequenceRows([5] * length, 0, range(WINDOW // 16), 1)
        times = []
        for _ in range(6):
            started = time.perf_counter()
            engine.forward([rows])
            queued = time.perf_counter() - started
            if day.is_gpu:
                import torch

                torch.cuda.synchronize()
            times.append((time.perf_counter() - started, queued))
        seconds, queued = median(times[1:])
        flops = 2 * length * sizes.num_hidden_layers * sum(sizes.layer_weights)
        flops += 2 * length**2 * sizes.num_hidden_layers * sizes.query_size  # half of all pairs, two products
        day.tell(
            "prompt",
            tokens=length,
            ms=round(1e3 * seconds, 2),
            host_ms=round(1e3 * queued, 2),
            tflops=round(flops / seconds / 1e12, 1),
        )


def _sizes(day: Day, path: Any) -> Sizes:
    if not day.model:
        return Sizes(**SHAPES["8b" if day.is_gpu else "tiny"])
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return Sizes(
        **{name: getattr(config, name) for name in names},
        num_key_value_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=getattr(config, "head_dim", None) or 0,
    )


def _empty_cache(day: Day) -> None:
    if day.is_gpu:
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
