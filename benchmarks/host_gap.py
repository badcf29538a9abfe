"""The host's time between two steps of a decode node on a GPU: from the tokens' arrival to the next launch.

    python -m benchmarks.host_gap [--sequences 1,8,32,128] [--context 512] [--steps 200]

The loop, scheduler, block tables, sampling states and batches are the node's own; the device computes nothing, and the
tokens are always the same. While a GPU would wait, the engine thread commits, plans, and lays out and copies the next
batch; all else it does while the GPU computes. Times are of the thread's processor, the median of all steps, without
drafts. What a launch itself takes, and padding to a graph's bucket, are not in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from decode_node.admission import Admission
from decode_node.commands import RouterCommand
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.gather import DraftGatherer
from decode_node.sequence_group_manager import SequenceGroupManager
from outrider.engine.engine import Engine
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.pending import Pending
from outrider.engine.sampler import SampledRows, Sampler, SampleRows
from outrider.engine.scheduler import Scheduler
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
"""Milliseconds, and microseconds a sequence."""


class Device:
    """In place of a ModelRunner. Notes the thread's time at each launch."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.launched_at = 0
        self._buffer = np.empty(1 << 22, dtype=np.uint8)

    def forward(self, batch: InputBatch, *, on_layer_done: object = None) -> Any:
        packed = batch.packed()
        self._buffer[: len(packed)] = packed
        self.launched_at = time.thread_time_ns()
        return np.empty((batch.num_logits, 0), dtype=np.float32)


class FixedSampler(Sampler):
    """Always the same token. Notes the thread's time when the tokens are there."""

    arrived_at = 0

    def queue(self, logits: Any, rows: Sequence[SampleRows]) -> Pending[SampledRows]:
        def finish(_arrays: Any) -> SampledRows:
            self.arrived_at = time.thread_time_ns()
            return SampledRows([TOKEN_ID] * len(rows), [None] * len(rows))

        return Pending((), finish)


def measure(num_sequences: int, *, context: int, num_steps: int) -> tuple[float, float]:
    """Microseconds of the gap, and of a whole step of the engine thread."""
    max_length = context + num_steps + WARM_UP_STEPS + 2 * num_sequences + 8
    num_blocks = num_sequences * (max_length // BLOCK_SIZE + 2)
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"")
    device = Device()
    sampler = FixedSampler(vocab_size=VOCAB_SIZE, known_token_ids=np.ones(VOCAB_SIZE, dtype=bool))
    engine = Engine(
        pool=pool,
        scheduler=Scheduler(pool, max_running=num_sequences, max_rows_per_step=4096),
        kv_cache=ScriptedKVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE),  # type: ignore[arg-type]
        runner=device,  # type: ignore[arg-type]
        sampler=sampler,
    )
    drafts = DraftGatherer(client=None, controller=DraftController(num_speculative_tokens=0))
    groups = SequenceGroupManager(
        engine=engine,
        drafts=drafts,
        ingest=SimpleNamespace(),  # type: ignore[arg-type]  # prompts are computed here
        admission=Admission(pool, max_running_sequences=num_sequences, max_model_len=max_length, vocab_size=VOCAB_SIZE),
        max_local_prefill_tokens=context,
        transfer_timeout_seconds=60.0,
    )
    loop = DecodeLoop(
        engine=engine,
        drafts=drafts,
        groups=groups,
        profiler=StepProfiler(engine.clock),
        verifier=RequestVerifier(sampler),
        emit=lambda _events, _stats: None,
    )
    for number in range(num_sequences):
        sampling = SamplingParams(seed=number, max_tokens=max_length - context)
        opened = OpenSequenceGroup(
            sequence_group_id=number.to_bytes(16, "big"),
            transfer_id=b"",
            request_id="",
            prompt_token_ids=(*range(1, context), number + 1),
            samples=(SampleStart(0),),
            options=RequestOptions(sampling=sampling),
        )
        loop.submit(RouterCommand(1, opened, "host"))
    while engine.scheduler.num_running < num_sequences or any(
        each.num_uncomputed > 1 for each in engine.scheduler.running
    ):
        loop.iterate()
    gaps, steps, before = [], [], 0
    for step in range(num_steps + WARM_UP_STEPS):
        arrived_at = sampler.arrived_at
        loop.iterate()
        if step >= WARM_UP_STEPS:
            gaps.append((device.launched_at - arrived_at) / 1000)
            steps.append((device.launched_at - before) / 1000)
        before = device.launched_at
    assert engine.scheduler.num_running == num_sequences
    return median(gaps), median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's time between two steps of a decode node on a GPU.")
    parser.add_argument("--sequences", default="1,8,32,128", metavar="N,…")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS", help="default 512")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default 200")
    arguments = parser.parse_args()
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
