"""Times and profiles steps of the 8B shape, with graphs and without, and compares them to their floor (see gpu_floor).

A step's time includes everything: batch, forward pass, sampling, and the copy of its tokens to the host. Then the
decode node's own loop is timed with such steps. Whole prompts are timed, too, as a prefill node computes them.
"""

from __future__ import annotations

import cProfile
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu_floor import Sizes, floor_ms
from checks.gpu_stages.day import SHAPES, WINDOW, Day
from checks.gpu_stages.engine import ALL_STEPS, OpenEngine, open_engine, tables
from checks.gpu_stages.env import bytes_per_second
from checks.gpu_stages.kernel_spans import busy_and_pauses, kernel_spans
from checks.gpu_stages.loop import measure_loop
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows
from outrider.engine.sampler import SampleRows
from outrider.request import SamplingParams

BLOCK_SIZE = 16
SAMPLING: dict[str, Any] = {"temperature": 0.8}
CHUNK = 32
"""Number of prompt tokens in a mixed step."""
LONGEST_PROMPT = WINDOW - 16
SPREADS = (0.5, 10.0)
"""Standard deviations of the logits with which sampling alone is timed: top_p keeps most tokens, or a few."""
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.95})
SHOWN_KERNELS, SHOWN_NAME = 12, 48
"""Number of kernels or of the host's functions that a profile shows, and of characters of their names."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `num_rows` rows of each sequence at `context` tokens, and `chunk` tokens of one more prompt."""

    name: str
    num_seqs: int
    context: int
    num_rows: int = 1
    chunk: int = 0

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a sequence or of the further prompt."""
        return self.context + self.num_rows

    @property
    def num_blocks(self) -> int:
        return (self.num_seqs + 1) * -(-self.max_tokens // BLOCK_SIZE)

    def __str__(self) -> str:
        return f"{self.name} of {self.num_seqs} sequences at {self.context} tokens"


def run(day: Day) -> None:
    path = day.model or day.random_model("8b" if day.is_gpu else "tiny")
    batches, context = ((1, 8, 32, 128), 512) if day.is_gpu else ((1, 4), 64)
    decodes = [Case("decode", num_seqs, context) for num_seqs in batches]
    others = [
        Case("verify", batches[1], context, num_rows=5),
        Case("mixed", batches[-2], context, chunk=CHUNK),
        Case("decode", batches[-1], 4 * context),
    ]
    sizes, bandwidth = _sizes(day, path), bytes_per_second(day.device)
    engine = _open(day, path, (*decodes, *others))
    steps = _Steps(day, engine, sizes, bandwidth, graphs=True)
    for case in decodes:
        steps.measure(case)
    if day.is_gpu:
        for case in (decodes[0], decodes[-1]):
            steps.profile(case)
    with day.part("the decode node's loop"):
        measure_loop(day, engine, batches, context=context, sizes=sizes, bandwidth=bandwidth)
    for case in others:
        steps.measure(case)
    for case in decodes:
        steps.measure(case, top_p=0.95)
    with day.part("sampling"):
        _sampling(day, engine, (batches[0], batches[-1]), sizes.vocab_size)
    loaded = engine.loaded
    del engine, steps
    _empty_cache(day)
    # These graphs are only for prompts: steps have logits.
    engine = _open(day, path, decodes, graphs=GraphShapes(has_logits=False), num_rows=LONGEST_PROMPT, loaded=loaded)
    _prompts(day, engine, sizes)
    steps = _Steps(day, engine, sizes, bandwidth, graphs=False)
    for case in (decodes[0], decodes[-1]):
        steps.measure(case)


def _open(day: Day, path: Any, cases: Sequence[Case], *, graphs: GraphShapes = ALL_STEPS, **options: Any) -> OpenEngine:
    started = time.monotonic()
    num_blocks = max(WINDOW // BLOCK_SIZE, *(case.num_blocks for case in cases))
    engine = open_engine(day, path, num_blocks=num_blocks, graphs=graphs, **options)
    if day.is_gpu:
        engine.fill()
    day.tell(
        "open",
        graphs=engine.runner.padded_rows,
        seconds=round(time.monotonic() - started, 1),
        model=engine.loaded.info.name,
        kernels=str(engine.loaded.kernels),
        attention=engine.runner.attention_name,
    )
    return engine


class _Steps:
    def __init__(self, day: Day, engine: OpenEngine, sizes: Sizes, bandwidth: float, *, graphs: bool) -> None:
        self._day = day
        self._engine = engine
        self._sampler = engine.loaded.open_sampler()
        self._sizes = sizes
        self._bandwidth = bandwidth
        self._graphs = graphs

    def measure(self, case: Case, **sampling: float) -> None:
        with self._day.part(f"{case}, {sampling}"):
            self._measure(case, sampling)

    def profile(self, case: Case) -> None:
        with self._day.part(f"profile of {case}"):
            self._profile(case)

    def _measure(self, case: Case, sampling: dict[str, Any]) -> None:
        """Measures the median of 30 steps (8 without graphs, 3 on a CPU) after three uncounted ones."""
        times = _times(self._step_of(case, sampling), 3 if not self._day.is_gpu else 30 if self._graphs else 8)
        ms = 1e3 * median(times)
        floor = floor_ms(self._sizes, case.num_seqs, case.context, self._bandwidth)
        self._day.tell(
            "step",
            case=case.name,
            graphs=self._graphs,
            **sampling,
            seqs=case.num_seqs,
            context=case.context,
            ms=round(ms, 3),
            p90_ms=round(1e3 * sorted(times)[int(0.9 * len(times))], 3),
            floor_ms=round(floor, 3),
            times_floor=round(ms / floor, 2),
        )

    def _profile(self, case: Case) -> None:
        """Records a step's number of kernels, the share of its time that the device computes, and its longest kernels.

        The profiler slows the host down, so the share is relative to the time of an unprofiled step. The pauses are
        those of profiled steps.
        """
        num_steps = 5
        step = self._step_of(case, {})
        step_seconds = median(_times(step, 10))
        kernels = kernel_spans(step, num_steps)
        busy_us, pauses_us = busy_and_pauses([(start, end) for start, end, _ in kernels])
        self._day.tell(
            "profile",
            case=case.name,
            seqs=case.num_seqs,
            busy=round(1e-6 * busy_us / num_steps / step_seconds, 3),
            busy_ms=round(1e-3 * busy_us / num_steps, 3),
            step_ms=round(1e3 * step_seconds, 3),
            pause_ms=round(1e-3 * median(sorted(pauses_us)[1 - num_steps :]), 3),  # between two steps
            kernels=len(kernels) // num_steps,
            longest=_longest(kernels, num_steps),
        )

    def _step_of(self, case: Case, sampling: dict[str, Any]) -> Callable[[], None]:
        params = SamplingParams(seed=1, max_tokens=64, **(SAMPLING | sampling))
        state = self._sampler.start(params, sample=0, prompt_token_ids=[1])
        places = list(tables(case.num_seqs + 1, case.max_tokens, BLOCK_SIZE))
        tokens = list(range(5, 5 + case.num_rows))
        start = case.context - 1
        asked = [SampleRows(state, case.context, tuple(tokens[1:]))] * case.num_seqs

        def step() -> None:
            rows = [SequenceRows(tokens, start, table, len(tokens)) for table in places[:-1]]
            if case.chunk:
                rows.append(SequenceRows([9] * case.chunk, case.context - case.chunk, places[-1], 0))
            self._sampler.sample(self._engine.forward(rows), asked)

        return step


def _times(step: Callable[[], object], num_steps: int) -> list[float]:
    """Returns seconds of each step, after three uncounted ones."""
    times = []
    for _ in range(3 + num_steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times[3:]


def _longest(kernels: Sequence[tuple[float, float, str]], num_steps: int) -> list[tuple[str, int, int]]:
    """Returns the name, the count per step and the microseconds per step of the kernels that take longest."""
    by_name: dict[str, list[float]] = {}
    for start, end, name in kernels:
        by_name.setdefault(name[:SHOWN_NAME], []).append(end - start)
    longest = sorted(by_name.items(), key=lambda entry: -sum(entry[1]))[:SHOWN_KERNELS]
    return [(name, len(times) // num_steps, round(sum(times) / num_steps)) for name, times in longest]


def _sampling(day: Day, engine: OpenEngine, batches: Sequence[int], vocab_size: int) -> None:
    """Times the sampler alone, on normal logits that are flat or have peaks, and shows its kernels."""
    import torch

    sampler = engine.loaded.open_sampler()
    num_steps = 20 if day.is_gpu else 3
    for num_seqs in batches:
        normal = torch.randn((num_seqs, vocab_size), generator=torch.Generator().manual_seed(1))
        for spread, filters in itertools.product(SPREADS, FILTERS):
            state = sampler.start(SamplingParams(seed=1, max_tokens=64, **filters), sample=0, prompt_token_ids=[1])
            step = partial(sampler.sample, (normal * spread).to(day.device), [SampleRows(state, 5)] * num_seqs)
            day.tell(
                "sampling",
                seqs=num_seqs,
                spread=spread,
                **filters,
                ms=round(1e3 * median(_times(step, num_steps)), 3),
                longest=_longest(kernel_spans(step, num_steps), num_steps) if day.is_gpu else [],
            )


def _prompts(day: Day, engine: OpenEngine, sizes: Sizes) -> None:
    """Times whole prompts, each in one forward pass; the host's part is the time until the pass is queued.

    Short prompts are timed with graphs and without, and the host's longest calls are recorded without. The difference
    is the logits of one row, which no graph has.
    """
    import torch

    for length in (64, 256, 512, LONGEST_PROMPT) if day.is_gpu else (64,):
        has_graph = length <= max(engine.runner.padded_rows, default=0)
        for num_logits in (0, 1) if has_graph else (0,):
            rows = SequenceRows([5] * length, 0, range(WINDOW // BLOCK_SIZE), num_logits)
            times = []
            for _ in range(6):
                started = time.perf_counter()
                engine.forward([rows])
                queued = time.perf_counter() - started
                if day.is_gpu:
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - started, queued))
            seconds, queued = median(times[1:])
            flops = 2 * length * sizes.num_hidden_layers * sum(sizes.layer_weights)
            flops += 2 * length**2 * sizes.num_hidden_layers * sizes.query_size  # two products for half of all pairs
            day.tell(
                "prompt",
                tokens=length,
                graph=has_graph and not num_logits,
                ms=round(1e3 * seconds, 2),
                host_ms=round(1e3 * queued, 2),
                tflops=round(flops / seconds / 1e12, 1),
            )
    without_graph = SequenceRows([5] * 64, 0, range(WINDOW // BLOCK_SIZE), 1)
    day.tell("host", case="a prompt of 64 tokens", longest=_longest_calls(lambda: engine.forward([without_graph])))


def _longest_calls(run: Callable[[], object]) -> list[tuple[str, int, int]]:
    """Returns the functions that take most of the host's time, without that of the functions that they call: (name,
    calls, µs), per run. The profiler adds to each call.
    """
    num_runs = 5
    profile = cProfile.Profile()
    for _ in range(num_runs):
        profile.runcall(run)
    of_functions = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)[:SHOWN_KERNELS]
    return [
        (
            code if isinstance(code := entry.code, str) else f"{Path(code.co_filename).stem}.{code.co_name}",
            entry.callcount // num_runs,
            round(1e6 * entry.inlinetime / num_runs),
        )
        for entry in of_functions
    ]


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
