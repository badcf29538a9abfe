"""A decode node without network and prefill around a target of its own, and drafts from beside it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.three_lines.pair import Pair
from decode_node.admission import Admission
from decode_node.commands import EventsBySession, GroupOpened
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.client import NO_TABLES, DraftClient, NoDrafts, StepDrafts
from decode_node.drafting.gather import DraftGatherer
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.statistics import StepStats
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.step_profiler import StepProfiler
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
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Progress, ProposalRequest, Proposer
from outrider.speculation.step_cost import StepCostModel
from outrider.speculation.verify.by_request import RequestVerifier

MAX_RUNNING = 64
MAX_WAIT_SECONDS = 0.002


class NoIngest:
    """For a node that computes every prompt itself."""

    def address(self, reached_host: str) -> str:
        return reached_host

    def has_seen(self, transfer_id: bytes) -> bool:
        return False


class ColocatedDrafts(NoDrafts):
    """The drafter on the target's device: a step begins when all drafts for it are made."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._requests: dict[int, ProposalRequest] = {}
        self.seconds = 0.0  # spent on drafts
        self.num_tokens = 0  # drafted

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int) -> None:
        self._requests[sequence_id] = ProposalRequest(sequence_id, list(token_ids), num_wanted, start)

    def update(
        self, updates: Sequence[tuple[int, Sequence[int], int]], tables: Mapping[int, SequenceKV] = NO_TABLES
    ) -> None:
        for sequence_id, token_ids, num_wanted in updates:
            request = self._requests[sequence_id]
            request = replace(request, token_ids=[*request.token_ids, *token_ids], num_wanted=num_wanted)
            self._requests[sequence_id] = request

    def close(self, sequence_id: int) -> None:
        if self._requests.pop(sequence_id, None) is not None:
            self._proposer.forget(sequence_id)

    def take(self, sequence_ids: Sequence[int], *, wait_seconds: float) -> StepDrafts:
        waiting = [self._requests[each] for each in sequence_ids if self._requests[each].num_wanted > 0]
        trees: dict[int, DraftTree] = {}
        started = time.perf_counter()
        while waiting:
            proposals = self._proposer.propose(waiting)
            trees |= {each.sequence_id: each.tree for each in proposals if each.progress is Progress.DONE}
            waiting = [request for request in waiting if request.sequence_id not in trees]
        self.seconds += time.perf_counter() - started
        self.num_tokens += sum(map(len, trees.values()))
        return StepDrafts(trees)


@dataclass(slots=True)
class Passed:
    """What one line has done so far."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)


class LineNode:
    """The real decode loop; the caller's thread is its engine thread."""

    def __init__(
        self, pair: Pair, drafts: DraftClient | ColocatedDrafts | NoDrafts, *, takes_trees: bool = False
    ) -> None:
        self.drafts = drafts
        self.passed = Passed()
        self._engine = pair.engine()
        num_speculative_tokens = 0 if type(drafts) is NoDrafts else pair.num_speculative_tokens
        gatherer = DraftGatherer(
            client=drafts,
            controller=DraftController(
                num_speculative_tokens=num_speculative_tokens,
                cost=StepCostModel(buckets=self._engine.runner.padded_rows),
            ),
            max_wait_seconds=MAX_WAIT_SECONDS,
            takes_trees=takes_trees,
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
        """All of them together, until the last is complete. Counts what it takes. The answers, in order."""
        self._texts, self._num_done = {}, 0
        started = time.perf_counter()
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
            self._loop.submit(GroupOpened(0, group, "127.0.0.1"))
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
