"""Measures the host's time between two steps of a decode node on a GPU: from the tokens' arrival to the next launch.

    python -m benchmarks.host_gap [--sequences 1,8,32,128] [--context 512] [--steps 200]

The loop, scheduler, block tables, sampling states and batches (with padding and work lists for CUDA graphs) are the
node's own. The device computes nothing, and the tokens are always the same. There are no drafts. Times are medians of
the thread's CPU time over all steps. They exclude the driver's time for a graph launch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from decode_node.admission import Admission
from decode_node.commands import RouterCommand
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.gather import DraftGatherer
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.step import StepStats
from outrider.engine.engine import Engine
from outrider.engine.gpu_kernels.work_list import Tile, WorkLists
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.pending import Pending
from outrider.engine.sampler import SampledRows, Sampler, SampleRows
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.step_profiler import StepProfiler
from outrider.request import RequestOptions, SamplingParams
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.verify.by_request import RequestVerifier
from tests.support.fake_kv_cache import ScriptedKVCache

BLOCK_SIZE = 16
VOCAB_SIZE = 512
TOKEN_ID = 7
WARM_UP_STEPS = 20
TARGET = (0.3, 5.0)
"""Target of the gap: milliseconds per step, plus microseconds per sequence."""


class FixedSampler(Sampler):
    """Always returns the same token. Records the thread's CPU time at which the tokens are available."""

    arrived_at = 0

    def queue(self, logits: Any, rows: Sequence[SampleRows]) -> Pending[SampledRows]:
        def finish(_arrays: Any) -> SampledRows:
            self.arrived_at = time.thread_time_ns()
            return SampledRows([TOKEN_ID] * len(rows), [None] * len(rows))

        return Pending((), finish)


class Device:
    """Replaces a ModelRunner that replays CUDA graphs. Records the thread's CPU time from tokens to the next launch."""

    is_asynchronous = True

    def __init__(self, num_blocks: int, sampler: FixedSampler) -> None:
        self.gaps: list[int] = []  # nanoseconds
        self._sampler = sampler
        lists = WorkLists(Tile(), num_heads=32, num_kv_heads=8, num_programs=264)
        self._graphs = StepGraphs(
            GraphShapes(),
            device=torch.device("cpu"),
            scratch_blocks=(num_blocks,),
            block_size=BLOCK_SIZE,
            capture=lambda _run: lambda: None,
            plan=lambda batch: batch.with_plan(lists.plan(batch)),
        )
        self._graphs.capture_all(lambda batch: torch.empty((batch.num_logits, 1)))
        self.prepare_ahead = self._graphs.padded

    def forward(self, batch: InputBatch, *, on_layer_done: object = None) -> Any:
        logits = self._graphs.run(batch)
        self.gaps.append(time.thread_time_ns() - self._sampler.arrived_at)
        return np.empty((batch.num_logits, 0), dtype=np.float32) if logits is None else logits


class RunningLoop:
    """A decode node's loop without routers, drafters or transfers: it computes prompts itself, and sends nothing."""

    def __init__(self, engine: Engine, *, context: int, max_tokens: int, max_sequences: int) -> None:
        """Prompts have `context` tokens, and each answer has `max_tokens`."""
        self._engine = engine
        self._context = context
        self._max_tokens = max_tokens
        drafts = DraftGatherer(client=None, controller=DraftController(num_speculative_tokens=0))
        admission = Admission(
            engine.pool,
            max_running_sequences=max_sequences,
            max_model_len=context + max_tokens,
            vocab_size=engine.sampler.vocab_size,
        )
        groups = SequenceGroupManager(
            engine=engine,
            drafts=drafts,
            ingest=SimpleNamespace(),  # type: ignore[arg-type]  # nothing is transferred
            admission=admission,
            max_local_prefill_tokens=context,
            transfer_timeout_seconds=60.0,
        )
        self._loop = DecodeLoop(
            engine=engine,
            drafts=drafts,
            groups=groups,
            profiler=StepProfiler(engine.clock),
            verifier=RequestVerifier(engine.sampler),
            emit=self._emit,
        )
        self.nanoseconds: Mapping[str, int] = {}
        """The engine thread's time in the last reported step, which is the one before the last, by part."""
        self.step = self._loop.iterate

    def _emit(self, _events: object, stats: StepStats | None) -> None:
        if stats is not None:
            self.nanoseconds = stats.nanoseconds

    def grow(self, num_sequences: int, **sampling: Any) -> None:
        """Adds sequences whose prompts share no block, and runs steps until `num_sequences` of them decode."""
        scheduler = self._engine.scheduler
        for number in range(scheduler.num_running, num_sequences):
            opened = OpenSequenceGroup(
                sequence_group_id=number.to_bytes(16, "big"),
                transfer_id=b"",
                request_id="",
                prompt_token_ids=(number + 1, *range(1, self._context)),
                samples=(SampleStart(0),),
                options=RequestOptions(sampling=SamplingParams(seed=number, max_tokens=self._max_tokens, **sampling)),
            )
            self._loop.submit(RouterCommand(1, opened, "host"))
        while scheduler.num_running < num_sequences or any(each.num_uncomputed > 1 for each in scheduler.running):
            self.step()


def measure(num_sequences: int, *, context: int, num_steps: int) -> tuple[float, float]:
    """Returns the engine thread's CPU time for the gap and for a whole step, in microseconds."""
    max_tokens = num_steps + WARM_UP_STEPS + 2 * num_sequences + 8
    num_blocks = num_sequences * ((context + max_tokens) // BLOCK_SIZE + 4)  # admission keeps some back
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"")
    sampler = FixedSampler(vocab_size=VOCAB_SIZE, known_token_ids=np.ones(VOCAB_SIZE, dtype=bool))
    device = Device(num_blocks, sampler)
    engine = Engine(
        pool=pool,
        scheduler=Scheduler(pool, max_running=num_sequences, max_rows_per_step=4096),
        kv_cache=ScriptedKVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE),  # type: ignore[arg-type]
        runner=device,  # type: ignore[arg-type]
        sampler=sampler,
    )
    loop = RunningLoop(engine, context=context, max_tokens=max_tokens, max_sequences=num_sequences)
    loop.grow(num_sequences)
    steps = []
    for _ in range(num_steps + WARM_UP_STEPS):
        started = time.thread_time_ns()
        loop.step()
        steps.append(time.thread_time_ns() - started)
    assert engine.scheduler.num_running == num_sequences
    return median(device.gaps[-num_steps:]) / 1000, median(steps[-num_steps:]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's time between two steps of a decode node on a GPU.")
    parser.add_argument("--sequences", default="1,8,32,128", metavar="N,…")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS", help="default 512")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default 200")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # time for which threads wait for each other would count as the host's
    counts = [int(each) for each in arguments.sequences.split(",")]
    gaps = []
    print("sequences   gap µs   step µs")
    for count in counts:
        gap, step = measure(count, context=arguments.context, num_steps=arguments.steps)
        gaps.append(gap)
        print(f"{count:9}{gap:9.0f}{step:10.0f}", flush=True)
    if len(counts) > 1:
        slope, base = np.polyfit(counts, gaps, 1)
        print(f"gap: {base / 1000:.3f} ms + {slope:.1f} µs a sequence; wanted: {TARGET[0]} ms + {TARGET[1]:.0f} µs")


if __name__ == "__main__":
    main()
