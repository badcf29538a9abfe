"""READ FIRST. The decode node's engine thread: open → receive KV → verify drafts → commit → report.

A router opens a sequence group; the node reserves blocks and grants it. A prefill node fills the
blocks, or this node computes a short remainder itself. From then on every sample is a sequence in the
running batch. A step verifies the available draft tokens of all sequences in one forward pass, commits
the accepted ones and one more token of the target model, and reports them.

Tokens depend on the target model, the prompt, the parameters and the seed. Drafts only change how many
tokens one step yields.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from decode_node.commands import (
    Command,
    DrainExpired,
    DrainStarted,
    EventsBySession,
    RouterCommand,
    SessionEnded,
    TransferCompleted,
    TransferFailed,
    is_safe_during_step,
)
from decode_node.drafting.gather import DraftGatherer
from decode_node.groups import Sample
from decode_node.inbox import Inbox
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.step import (
    LaunchedStep,
    PlannedSequence,
    StepReport,
    StepStats,
    Verdict,
    apply_stop_conditions,
    step_kind,
)
from decode_node.step_ahead import launch_next, lay_out_next
from outrider.drafting.book import StepDrafts
from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.engine import Engine
from outrider.engine.pending import read
from outrider.engine.sampler.logprobs import split_scored_rows
from outrider.engine.scheduler import StepPlan
from outrider.engine.step_profiler import StepProfiler
from outrider.engine.step_progress import StepProgress
from outrider.faults import fault_point
from outrider.profile import EndProfile, Part, StartProfile
from outrider.session import CancelSequenceGroup, OpenSequenceGroup, RetargetSequenceGroup
from outrider.speculation.verify.base import Verified
from outrider.speculation.verify.by_request import RequestVerifier

IDLE_WAIT_SECONDS = 0.2
TURN_WAIT_SECONDS = 0.005
"""Seconds between two checks for commands while other nodes use the processors."""


class DecodeLoop:
    """The engine thread, the sole owner of the running batch and the block pool.

    It communicates through two queues: `submit` accepts frozen commands from any thread; `emit`, called from the
    engine thread, takes frozen events and must not block.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        drafts: DraftGatherer,
        groups: SequenceGroupManager,
        profiler: StepProfiler,
        verifier: RequestVerifier,
        emit: Callable[[EventsBySession, StepStats | None], None],
        cpu_turns: CpuTurns | None = None,
    ) -> None:
        self._engine = engine
        self._drafts = drafts
        self._groups = groups
        self._profiler = profiler
        self._verifier = verifier
        self._time = engine.clock
        self._emit = emit
        self._cpu_turns = cpu_turns or CpuTurns()
        self._inbox = Inbox()
        self.has_room = self._inbox.has_room
        self._delayed: deque[Command] = deque()  # taken from the inbox while the device computed, and handled later
        self._launched: LaunchedStep | None = None  # the next step, if the device already computes it
        self._unreported: StepReport | None = None  # the last step's report, if not yet emitted
        self._failed: list[Sample] = []  # samples that failed in the last step; their requests end before the next
        self._stopping = threading.Event()
        self.progress = StepProgress()
        self.is_drained = False  # whether, since DrainStarted, all groups have ended and their events were emitted

    def submit(self, command: Command) -> None:
        """Queues a command. Any thread may call it. A router's command requires `has_room`.

        An OpenSequenceGroup with a constraint is queued once another thread has compiled the constraint.
        """
        match command:
            case RouterCommand(message=OpenSequenceGroup(options=options)) if options.sampling.constraint is not None:
                constraints = self._engine.sampler.constraints
                assert constraints is not None
                compiled = constraints.prepare(options.sampling.constraint)
                self._inbox.put_when_compiled(replace(command, compiled=compiled), compiled)
            case _:
                self._inbox.put(command)

    def stop(self) -> None:
        """Ends the thread after the current step and frees all groups."""
        self._stopping.set()
        self._inbox.put(DrainStarted())  # wakes an idle thread

    def run(self) -> None:
        """Runs the engine until `stop`. An exception from here is a bug, and the process must not go on serving."""
        while self._launched is not None or not self._stopping.is_set():
            self.iterate()
        self._report()
        self._profiler.end()
        self._groups.free_all()

    def iterate(self) -> None:
        """Handles commands, then runs one step if there is work, and reports it.

        Groups are granted before the step, and before the node waits for its turn on the processors, since the prefill
        of a granted group runs in parallel. If the device already computes the next step, commands wait until `step`
        handles them.
        """
        self.progress.begin()
        if self._launched is None:
            self._end_failed()
            self._process_commands(wait=not self._engine.scheduler.has_work)
        else:
            self.progress.expect(self._launched.plan.num_rows)
        try:
            if self._launched is not None or (self._engine.scheduler.has_work and self._take_turn()):
                self.step()
        finally:
            self._cpu_turns.give()  # does nothing after a complete step, which has given the turn back
        if not (self._engine.runner.is_asynchronous and self._engine.scheduler.has_work):
            self._report()  # otherwise the next step reports while the device computes
        self.progress.end()

    def _process_commands(self, *, wait: bool = False) -> None:
        """Processes queued commands; with `wait`, blocks briefly for one."""
        self._handle_commands(wait=wait)
        self._groups.advance_groups()
        self._time.mark(Part.COMMANDS)
        self._emit_events(None)

    def _process_commands_while_computing(self) -> None:
        """Reports the last step and handles new commands. Neither needs a result of the running step.

        A command that may end a sequence of the running step waits for the step, and so do the commands behind it, so
        that their order is kept.
        """
        self._report()
        self._delayed += self._inbox.take_batch()
        while self._delayed and is_safe_during_step(self._delayed[0]):
            self._handle(self._delayed.popleft())
        if not self._delayed:  # a delayed retarget must be handled before its group can time out
            self._groups.advance_groups()
        self._time.mark(Part.COMMANDS)
        self._emit_events(None)

    def _report(self) -> None:
        """Reports what the last step committed, if it is not reported yet."""
        report, self._unreported = self._unreported, None
        if report is None:
            return
        report.publish_blocks()
        for group, event in report.events():
            self._groups.report(group, event)
        fault_point("decode.before_emit")
        self._emit_events(report.stats())

    def _end_failed(self) -> None:
        """Fails the requests whose constraints allow no further token."""
        if self._failed:
            self._report()
            for sample in self._failed:
                self._groups.fail(sample, sample.sampling.failure)
            self._failed.clear()

    def _take_turn(self) -> bool:
        """Waits for a turn on the processors and handles commands meanwhile. Returns False if no work is left."""
        is_taken = self._cpu_turns.take(0.0)
        if not is_taken:
            self._drafts.send_updates()
            self._report()
        while not is_taken and self._engine.scheduler.has_work and not self._stopping.is_set():
            with self.progress.paused():
                is_taken = self._cpu_turns.take(TURN_WAIT_SECONDS)
            self._time.mark(Part.CPU_TURN)
            self._process_commands()  # also once the turn is taken, so that new commands still join this step
        return is_taken and self._engine.scheduler.has_work

    def _emit_events(self, stats: StepStats | None) -> None:
        events = self._groups.take_events()
        if events or stats:
            self._emit(events, stats)
        has_commands = self._delayed or not self._inbox.is_empty
        self.is_drained = self._groups.is_draining and self._groups.num_groups == 0 and not has_commands
        self._time.mark(Part.EMIT)

    def step(self) -> None:
        """Runs one forward pass of the target model over every planned sequence, and commits its results.

        Does nothing if no sequence could be planned (all blocks are held by transfers in progress).
        """
        fault_point("decode.step")
        started = self.progress.clock()
        step, self._launched = self._launched or self._launch(), None
        if step is None:
            return
        plan = step.plan
        verifying = [item for item in step.planned if item.scheduled.reaches_end]
        logits, scored = split_scored_rows(plan, step.logits)
        if len(verifying) < len(plan.scheduled):
            for item in plan.scheduled:
                if not item.reaches_end and item.sequence.kv is not None:
                    item.sequence.kv.advance(item.sequence.num_computed + item.num_rows)
        pending = self._verifier.queue(logits, [item.draft_rows() for item in verifying])
        batch = None
        if self._engine.runner.is_asynchronous:
            self._time.mark(Part.SAMPLING)
            self._process_commands_while_computing()
            if step.is_ahead and self._drafts.may_gather_late:
                step = step._replace(drafts=self._gather(may_wait=False))
            samples = [item.sample for item in verifying]
            if not self._delayed and not self._drafts.awaits_drafts(samples, step.drafts):
                batch = lay_out_next(step, self._engine)
                self._time.mark(Part.BATCH)
        verified, *scores = read(pending, *scored)  # the only place that waits for the device
        self._time.mark(Part.SAMPLING)
        if batch is not None and self._may_launch_next():
            self._launched = launch_next(batch, step, verified, self._engine, self.progress.clock)
        self._cpu_turns.give()  # the rest of the step needs one thread
        self._groups.report_scores(scores)
        self._time.mark(Part.SAMPLING)
        verdicts = self._commit(verifying, verified)
        if self._launched is not None:
            self._drafts.begin_step(self._launched.planned)
        self._drafts.observe_step(
            seconds=self.progress.clock() - max(started, step.launched_at),
            num_rows=plan.num_rows,
            num_sequences=len(plan.scheduled),
            num_prompt_rows=sum([item.num_rows for item in plan.scheduled if item.num_rows > 1]),
            is_ahead=step.is_ahead,
        )
        self._time.mark(Part.COMMIT)
        seconds, nanoseconds = self.progress.clock() - started, self._time.take()
        self._unreported = StepReport(step, verifying, verdicts, seconds, nanoseconds)
        if self._profiler.is_capturing:
            with self.progress.paused():  # torch's profiler may take seconds, which must not count as a slow step
                self._profiler.step_ended(
                    nanoseconds, kind=step_kind(plan), num_rows=plan.num_rows, scheduled=plan.scheduled
                )

    def _launch(self) -> LaunchedStep | None:
        """Plans the next step and begins its forward pass. Returns None if nothing could be planned."""
        # The step takes the available drafts. It waits for others within its budget, unless another node waits for
        # these processors.
        drafts = self._gather(may_wait=not self._cpu_turns.is_over(0.0))
        plan, planned = self._plan(drafts)
        self._time.mark(Part.SCHEDULE)
        preempted = self._groups.samples_of(plan.preempted)
        if preempted:
            fault_point("decode.preempted")
        if not plan.scheduled:
            self._cpu_turns.give()
            self._report()
            self._emit_events(None)
            self._wait_for_a_command()  # nothing fits until a transfer ends or is given up, which arrives as a command
            return None
        self.progress.expect(plan.num_rows)
        self._cpu_turns.keep(self.progress.current_step.expected_seconds)
        constrained = [each for each in planned if each.scheduled.reaches_end and each.sample.sampling.constraint]
        self._verifier.prepare([each.draft_rows() for each in constrained])
        self._drafts.begin_step(planned)
        launched_at = self.progress.clock()
        logits = self._engine.forward(plan.block_copies, [item.rows() for item in planned])
        return LaunchedStep(plan, planned, logits, launched_at, drafts, preempted)

    def _may_launch_next(self) -> bool:
        """Returns whether the next step may begin before queued commands. Their new groups then join a later step."""
        self._delayed += self._inbox.take_batch()
        return not self._stopping.is_set() and all(map(is_safe_during_step, self._delayed))

    def _gather(self, *, may_wait: bool) -> StepDrafts:
        drafts = self._drafts.gather(self._groups.samples_to_draft(), may_wait=may_wait)
        self._time.mark(Part.DRAFTING)
        self._time.move(round(drafts.waited_seconds * 1e9), source=Part.DRAFTING, target=Part.DRAFT_WAIT)
        return drafts

    def _plan(self, drafts: StepDrafts) -> tuple[StepPlan, list[PlannedSequence]]:
        """Decides which sequences run in the step, and which draft tokens get rows."""
        scheduler, samples_of = self._engine.scheduler, self._groups.samples_of
        # The number of prompts that these processors will compute once the turn is given back.
        num_waiting = max(1, self._groups.num_groups_awaiting_kv) if self._cpu_turns.is_over(0.0) else 0
        room = scheduler.reserve(reclaim=self._groups.reclaim_reservation)
        chosen = self._drafts.choose(drafts, room, samples_of(room.sequences), num_waiting=num_waiting)
        plan = scheduler.assign_rows(room, chosen)
        samples = samples_of([item.sequence for item in plan.scheduled])
        return plan, [
            PlannedSequence.of(item, sample, drafts.ranked.get(item.sequence.key))
            for item, sample in zip(plan.scheduled, samples, strict=True)
        ]

    # --- commands -------------------------------------------------------------------------

    def _handle_commands(self, *, wait: bool) -> None:
        """Handles the commands of one iteration; with `wait`, also waits briefly for one."""
        if self._delayed or not self._inbox.is_empty:
            self._report()  # first, since groups that a command ends have no further events
        while self._delayed:
            self._handle(self._delayed.popleft())
        if wait:
            self._wait_for_a_command()
        if not self._inbox.is_empty:
            for command in self._inbox.take_batch():
                self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case RouterCommand(message=OpenSequenceGroup() as opened):
                self._groups.open(command, opened)
            case RouterCommand(message=RetargetSequenceGroup() as retarget):
                self._groups.retarget(command.session_id, retarget)
            case RouterCommand(message=CancelSequenceGroup() as cancel):
                self._groups.cancel(command.session_id, cancel)
            case TransferCompleted():
                self._groups.transfer_completed(command)
            case TransferFailed():
                self._groups.transfer_failed(command)
            case SessionEnded():
                self._groups.end_session(command.session_id)
            case DrainStarted():
                self._groups.is_draining = True
            case DrainExpired():
                self._groups.fail_all("the node is draining")
            case StartProfile():
                self._profiler.begin(command.capture)
            case EndProfile():
                self._profiler.end(command.capture)

    def _wait_for_a_command(self) -> None:
        self._drafts.send_updates()
        with self.progress.paused():
            self._inbox.wait(IDLE_WAIT_SECONDS)
        self._time.mark(Part.IDLE)

    # --- verify and commit ----------------------------------------------------------------

    def _commit(self, verifying: Sequence[PlannedSequence], verified: Sequence[Verified]) -> list[Verdict]:
        """Cuts tokens after a stop, frees rejected slots, ends finished samples, and announces the others' tokens."""
        outcomes = list(zip(verifying, verified, strict=True))
        moved = [pair for item, outcome in outcomes if outcome.path for pair in item.moved_slots(outcome)]
        if moved:  # the KV must be in place before any block is published
            self._engine.kv_cache.move_slots(moved)
        verdicts: list[Verdict] = []
        continuing: list[tuple[Sample, tuple[int, ...]]] = []
        for (_, sample, draft), outcome in outcomes:
            verdict = apply_stop_conditions(
                outcome, draft, stop_token_ids=sample.stop_token_ids, num_tokens_left=sample.num_tokens_left
            )
            verdicts.append(verdict)
            if draft.token_ids:
                accepted = outcome.path or range(len(outcome.token_ids) - 1)
                self._drafts.observe_verdict(sample.sequence.key, draft, accepted)
            self._apply(sample, verdict)
            if verdict.finish_reason is None:
                continuing.append((sample, verdict.token_ids))
        self._drafts.announce(continuing)
        return verdicts

    def _apply(self, sample: Sample, verdict: Verdict) -> None:
        sequence = sample.sequence
        token_ids, kv = sequence.token_ids, sequence.kv
        assert kv is not None
        token_ids.extend(verdict.token_ids)
        # The newest token has no KV yet: it is the first row of the next step. Rejected slots are freed before the
        # step is reported. If there were no drafts, the next step may already have reserved blocks, which must stay.
        if verdict.num_draft_tokens:
            kv.truncate(len(token_ids) - 1)
        else:
            kv.advance(len(token_ids) - 1)
        self._engine.sampler.commit(sample.sampling, verdict.token_ids)
        if sample.sampling.failure:
            self._failed.append(sample)
        elif verdict.finish_reason is not None:
            kv.publish(token_ids)
            self._groups.finish(sample)
