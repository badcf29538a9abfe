"""A decode node's loop without routers and prefill nodes, with a local, a remote or no drafter."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.three_lines.pair import Pair
from decode_node.admission import Admission
from decode_node.commands import EventsBySession, RouterCommand
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.client import DraftClient
from decode_node.drafting.gather import DraftGatherer, FeaturesOf
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.step import StepStats
from outrider.engine.engine import Engine
from outrider.engine.step_profiler import StepProfiler
from outrider.engine_node import event_loop_clock
from outrider.errors import InternalError
from outrider.request import RequestOptions, SamplingParams
from outrider.session import (
    OpenSequenceGroup,
    Rejected,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
    SpeculationCounts,
)
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest, Proposer
from outrider.speculation.step_cost import StepCostModel
from outrider.speculation.verify.by_request import RequestVerifier

MAX_RUNNING = 64
MAX_WAIT_SECONDS = 0.002


class NoIngest:
    """Replaces the KV ingest, since this node computes every prompt itself."""

    def address(self, reached_host: str) -> str:
        return reached_host

    @property
    def inbox(self) -> NoIngest:
        return self

    def is_used_id(self, transfer_id: bytes) -> bool:
        return False


class TimedProposer:
    """A drafter in the target's process that measures its time and counts its tokens."""

    def __init__(self, proposer: Proposer, features_of: FeaturesOf | None = None) -> None:
        self.info = proposer.info
        self.features_of = features_of
        self.seconds = 0.0  # drafting time
        self.num_tokens = 0  # drafted
        self._proposer = proposer

    @property
    def num_wasted_tokens(self) -> int:
        return self._proposer.num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        started = time.perf_counter()
        proposals = self._proposer.propose(requests)
        self.seconds += time.perf_counter() - started
        self.num_tokens += sum(len(each.tree) for each in proposals if each.progress is Progress.DONE)
        return proposals

    def forget(self, sequence_id: int) -> None:
        self._proposer.forget(sequence_id)


@dataclass(slots=True)
class Passed:
    """The totals of one line so far."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)


class LineNode:
    """Runs the real decode loop, with the caller's thread as the engine thread."""

    def __init__(
        self,
        pair: Pair,
        engine: Engine,
        *,
        client: DraftClient | None = None,
        beside: TimedProposer | None = None,
        takes_trees: bool = False,
    ) -> None:
        """`client`: connects to a remote drafter. `beside`: a drafter in this process. Without both: plain decoding."""
        self.passed = Passed()
        self._engine = engine
        num_speculative_tokens = 0 if client is None and beside is None else pair.num_speculative_tokens
        gatherer = DraftGatherer(
            client=client,
            proposers=() if beside is None else (beside,),
            features_of=None if beside is None else beside.features_of,
            controller=DraftController(
                num_speculative_tokens=num_speculative_tokens,
                cost=StepCostModel(buckets=self._engine.runner.padded_rows),
            ),
            max_wait_seconds=MAX_WAIT_SECONDS,
            takes_trees=takes_trees,
            loop_clock=event_loop_clock(),
        )
        self._loop = DecodeLoop(
            engine=self._engine,
            drafts=gatherer,
            groups=SequenceGroupManager(
                engine=self._engine,
                drafts=gatherer,
                ingest=cast("Any", NoIngest()),
                admission=Admission(
                    self._engine.pool,
                    max_running_sequences=MAX_RUNNING,
                    max_model_len=pair.max_model_len,
                    vocab_size=pair.vocab_size,
                ),
                max_local_prefill_tokens=pair.max_model_len,
                transfer_timeout_seconds=30.0,
            ),
            verifier=RequestVerifier(self._engine.sampler),
            profiler=StepProfiler(self._engine.clock),
            emit=self._take_events,
        )
        self._ids = itertools.count()
        self._texts: dict[bytes, list[int]] = {}
        self._num_done = 0

    def answer(self, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int) -> list[list[int]]:
        """Answers all prompts concurrently. Returns the answers' token ids, in order.

        `passed` excludes the work until all prompts are computed, since prefill is the same in every line.
        """
        self._texts, self._num_done = {}, 0
        counted, self.passed = self.passed, Passed()
        for seed, prompt in enumerate(prompts):
            group_id = next(self._ids).to_bytes(16, "big")
            self._texts[group_id] = []
            group = OpenSequenceGroup(
                sequence_group_id=group_id,
                transfer_id=os.urandom(16),
                request_id="three-lines",
                prompt_token_ids=tuple(prompt),
                samples=(SampleStart(0),),
                options=RequestOptions(
                    sampling=SamplingParams(seed=seed, temperature=temperature, max_tokens=max_tokens)
                ),
            )
            self._loop.submit(RouterCommand(0, group, "127.0.0.1"))
        while not all(self._texts.values()):
            self._loop.iterate()
        self.passed = counted
        started = time.perf_counter()
        while self._num_done < len(prompts):
            self._loop.iterate()
        self.passed.seconds += time.perf_counter() - started
        return list(self._texts.values())

    def _take_events(self, events: EventsBySession, stats: StepStats | None) -> None:
        self.passed.num_steps += stats is not None
        for event in itertools.chain.from_iterable(events.values()):
            match event:
                case SampleTokens():
                    self._texts[event.sequence_group_id] += event.token_ids
                    self.passed.num_tokens += len(event.token_ids)
                    self.passed.counts = SpeculationCounts.total([self.passed.counts, event.speculation])
                case SampleDone():
                    self._num_done += 1
                case Rejected() | SequenceGroupFailed():
                    raise InternalError(f"the decode node gives up: {event}")
                case _:
                    continue
