"""What a decode node's step costs outside its forward pass: microseconds a sequence, and how that grows.

    python benchmarks/step_cost.py [--sequences 256] [--context 1000] [--targets 4] [--steps 40] [--device]

The decode loop is the real one, with scheduler, block pool, draft bookkeeping, verdicts, events and metrics. The model
is a script whose time is left out, so all that is measured is ours. The draft node's side is a
script too, which answers each update at once; three of four drafts are right.

Printed is the thread's CPU time, the median and the least of the steps; the least is what other programs disturb
least. `loop` is the engine thread's. With --device, `beside` is what of it is done while a device would compute.
`batch` lays out the input of the forward pass. The rest is the event loop's. `streams` is what it
does with the draft streams in a step, for all targets, holding the lock that the engine takes. `metrics` counts a
step's events. `wire` makes messages of updates and events, and values of the answers' messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from decode_node.admission import Admission
from decode_node.commands import EventsBySession, GroupOpened
from decode_node.decode_loop import DecodeLoop
from decode_node.draft_book import DraftBook, DraftWant
from decode_node.draft_gathering import DraftGatherer
from decode_node.drafts import NoDrafts
from decode_node.group_desk import GroupDesk
from decode_node.metrics import DecodeMetrics
from decode_node.sessions import merge_tokens
from decode_node.statistics import StepStats
from decode_node.step_drafts import StepDrafts
from outrider.bench.machine import describe_machine
from outrider.engine.fakes import ScriptedEngine, ScriptedSampledRows
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.pending import Pending
from outrider.engine.step_profiler import StepProfiler
from outrider.node import NodeReport, NodeState
from outrider.request import SamplingParams
from outrider.service.garbage import settle_garbage_collection
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.draft_stream import DraftStatus, SequenceProposals, SequenceStart, SequenceUpdate
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.verify.by_request import RequestVerifier
from outrider.v1 import draft_pb2
from outrider.wire.draft import proposals_from_proto, proposals_to_proto, updates_to_proto
from outrider.wire.session import report_message_to_proto

BLOCK_SIZE = 16
REPORT = NodeReport(state=NodeState.SERVING, incarnation=bytes(16))
NUM_DRAFT_TOKENS = 3
VOCAB_SIZE = 1000


def token_at(seed: int, position: int) -> int:
    """The text of the sequence with this seed."""
    return (7 * position + 13 * seed) % VOCAB_SIZE


def drafted_at(seed: int, position: int) -> int:
    """What the draft node guesses: wrong at every fourth position."""
    return token_at(seed, position + (position % 4 == 3))


class FreeRunner:
    """No model; lays its input out, and notes how long that took."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.batch_seconds = 0.0

    def forward(self, rows: Sequence[SequenceRows]) -> Sequence[SequenceRows]:
        started = time.thread_time()
        build_input_batch(rows, BLOCK_SIZE)
        self.batch_seconds = time.thread_time() - started
        return rows


class FreeSampler:
    """Knows each sequence's text; notes how long it took to say so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self, params: SamplingParams, **_: Any) -> Any:
        return type("State", (), {"params": params, "logprobs": None})()

    def commit(self, state: Any, token_ids: Sequence[int]) -> None:
        return

    def queue(self, logits: object, rows: Sequence[Any]) -> Pending[ScriptedSampledRows]:
        started = time.thread_time()
        token_ids = [
            token_at(row.state.params.seed, position)
            for row in rows
            for position in range(row.position, row.position + row.num_rows)
        ]
        sampled = ScriptedSampledRows(token_ids, [None] * len(token_ids))
        self.seconds = time.thread_time() - started
        return Pending((), lambda _: sampled)


class BookedDrafts(NoDrafts):
    """A draft client without streams: its book is the real one, and its nodes answer before the next step."""

    def __init__(self, num_targets: int) -> None:
        self.book = DraftBook(vocab_size=VOCAB_SIZE, clock=time.monotonic)
        self._targets = [self.book.add_target() for _ in range(num_targets)]
        for target in self._targets:
            self.book.connected(target)
        self._seeds: dict[int, int] = {}
        self.stream_seconds = 0.0
        self.wire_seconds = 0.0
        self.num_answered = 0  # updates, before the last step

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int = 5) -> None:
        self._seeds[sequence_id] = start.params.seed
        self.book.open(sequence_id, start, token_ids, num_wanted=num_wanted)

    def update(self, updates: Sequence[tuple[int, Sequence[int], int]]) -> None:
        for sequence_id, token_ids, num_wanted in updates:
            self.book.update(sequence_id, token_ids, num_wanted=num_wanted)

    def close(self, sequence_id: int) -> None:
        self.book.close(sequence_id)

    def take(self, wants: Sequence[DraftWant], *, wait_seconds: float) -> StepDrafts:
        found, _ = self.book.find(wants, wait_seconds=0.0)
        self.book.judge(wants, found, unanswered=())
        return StepDrafts(found, hits=frozenset(found))

    def observe_step(self, seconds: float) -> None:
        self.book.observe_step(seconds)

    def answer_all(self) -> None:
        """What the event loop does between two steps: an answer wakes every link, which looks for something to send."""
        started = time.thread_time()
        waiting = [(target, self.book.take_updates(target)) for target in self._targets]
        self.stream_seconds = time.thread_time() - started
        self.wire_seconds = 0.0
        self.num_answered = 0
        while waiting:
            target, updates = waiting.pop()
            if not updates:
                continue
            self.num_answered += len(updates)
            started = time.thread_time()
            updates_to_proto(updates, step_seconds=1e-6).SerializeToString()
            self.wire_seconds += time.thread_time() - started
            received = draft_pb2.DraftProposals(
                sequences=[proposals_to_proto(self._answer(update)) for update in updates if not update.closed]
            ).SerializeToString()
            started = time.thread_time()
            answers = [proposals_from_proto(each) for each in draft_pb2.DraftProposals.FromString(received).sequences]
            self.wire_seconds += time.thread_time() - started
            started = time.thread_time()
            self.book.take_proposals(target, answers)
            waiting += [(other, self.book.take_updates(other)) for other in self._targets]
            self.stream_seconds += time.thread_time() - started

    def _answer(self, update: SequenceUpdate) -> SequenceProposals:
        if not update.num_wanted:
            return SequenceProposals(update.sequence_id, DraftStatus.NOTHING, update.length)
        seed, length = self._seeds[update.sequence_id], update.length
        token_ids = tuple(drafted_at(seed, length + index) for index in range(NUM_DRAFT_TOKENS))
        branch = DraftTree(length, update.prefix_hash, token_ids)
        return SequenceProposals(update.sequence_id, DraftStatus.PROPOSED, length, (branch,))


class NoIngest:
    """Every prompt is computed here."""

    def has_seen(self, transfer_id: bytes) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one step."""

    loop: float
    beside: float
    batch: float
    streams: float
    metrics: float
    wire: float


class Bench:
    """A decode node of scripts around its real loop."""

    def __init__(self, num_sequences: int, context: int, num_targets: int, *, beside_device: bool = False) -> None:
        num_blocks = num_sequences * (context // BLOCK_SIZE + 40)
        self.events: EventsBySession = {}
        self.stats: StepStats | None = None
        runner: Any = FreeRunner(is_asynchronous=beside_device)
        sampler: Any = FreeSampler()
        base = ScriptedEngine.create(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_running=num_sequences, max_rows_per_step=8192
        )
        engine: Any = ScriptedEngine(base.pool, base.scheduler, base.kv_cache, runner, sampler)
        self.runner, self.sampler = runner, sampler
        self.drafts = BookedDrafts(num_targets)
        client: Any = self.drafts
        ingest: Any = NoIngest()
        gatherer = DraftGatherer(
            client=client,
            fallback=None,
            controller=DraftController(num_speculative_tokens=NUM_DRAFT_TOKENS),
            max_wait_seconds=0.0,
        )
        desk = GroupDesk(
            engine=engine,
            drafts=gatherer,
            ingest=ingest,
            admission=Admission(
                engine.pool,
                max_running_sequences=num_sequences,
                max_model_len=context + 600,
                vocab_size=VOCAB_SIZE,
            ),
            max_local_prefill_tokens=context,
            transfer_timeout_seconds=600.0,
        )
        self.scheduler = engine.scheduler
        self.loop = DecodeLoop(
            engine=engine,
            drafts=gatherer,
            desk=desk,
            profiler=StepProfiler(engine.clock),
            verifier=RequestVerifier(sampler),
            emit=self._emit,
        )
        self.beside_seconds = 0.0
        self._attend = self.loop._attend_while_computing  # noqa: SLF001 what is measured
        self.loop._attend_while_computing = self._attend_timed  # type: ignore[method-assign]  # noqa: SLF001
        self.metrics = DecodeMetrics("scripted", registry=CollectorRegistry())
        for seed in range(num_sequences):
            group = OpenSequenceGroup(
                sequence_group_id=seed.to_bytes(16, "big"),
                transfer_id=seed.to_bytes(16, "little"),
                request_id="bench",
                prompt_token_ids=tuple(token_at(seed, position) for position in range(context)),
                samples=(SampleStart(0),),
                sampling=SamplingParams(seed=seed, max_tokens=500),
            )
            self.loop.submit(GroupOpened(1, group, "localhost"))

    def _emit(self, events: EventsBySession, stats: StepStats | None) -> None:
        if stats is not None:
            self.events, self.stats = events, stats

    def _attend_timed(self) -> None:
        started = time.thread_time()
        self._attend()
        self.beside_seconds = time.thread_time() - started

    def step(self) -> Costs:
        """One turn of the loop, then what the event loop does with it."""
        self.drafts.answer_all()
        started = time.thread_time()
        self.loop.iterate()
        looped = time.thread_time()
        self.metrics.observe(self.events, self.stats)
        counted = time.thread_time()
        for events in self.events.values():
            report_message_to_proto(REPORT, merge_tokens(events)).SerializeToString()
        told = time.thread_time()
        return Costs(
            loop=looped - started - self.runner.batch_seconds - self.sampler.seconds - self.beside_seconds,
            beside=self.beside_seconds,
            batch=self.runner.batch_seconds,
            streams=self.drafts.stream_seconds,
            metrics=counted - looped,
            wire=self.drafts.wire_seconds + told - counted,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", action="store_true", help="the forward pass returns before it is computed")
    arguments = parser.parse_args()
    print(describe_machine())
    bench = Bench(arguments.sequences, arguments.context, arguments.targets, beside_device=arguments.device)
    while bench.stats is None or bench.stats.num_drafts < 0.95 * arguments.sequences:
        bench.step()
        if not bench.scheduler.has_work:
            raise SystemExit("never a step with drafts for nearly all sequences")
    settle_garbage_collection()
    costs: list[Costs] = []
    while len(costs) < arguments.steps:
        cost = bench.step()
        if bench.drafts.num_answered >= 0.95 * arguments.sequences:  # now and then drafts are worth nothing for a step
            costs.append(cost)
        if not bench.scheduler.has_work:
            raise SystemExit("too few steps with drafts for nearly all sequences")
    assert bench.stats is not None
    print(f"{bench.stats.num_sequences} sequences, {bench.stats.num_rows} rows, {bench.stats.num_drafts} drafts a step")
    middle, least = 0.0, 0.0
    for name in Costs.__slots__:
        micros = [getattr(cost, name) / arguments.sequences * 1e6 for cost in costs]
        middle, least = middle + median(micros), least + min(micros)
        print(f"{name:8} {median(micros):7.2f} us a sequence and step, at least {min(micros):7.2f}")
    print(f"step-cost: {middle:.1f} us a sequence and step, at least {least:.1f}")


if __name__ == "__main__":
    main()
