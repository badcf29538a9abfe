"""READ FIRST. The prefill node's engine thread: schedule chunks → forward → push → finish.

A job computes the part of a prompt that is not in the prefix cache, in chunks that share forward passes with other
jobs. It offers KV to its push one group of layers at a time, while the forward pass computes later layers; a drafter
head's features follow at the end of the pass. The push gathers and sends the KV meanwhile, and commits when all of it
has been sent. The decode node samples every token. Logits are computed only for prompt logprobs, a few rows per step,
and after the chunk's KV has been offered.

On a GPU, forward passes are queued one chunk ahead. A chunk counts as computed when the device has reached its end. A
chunk of few rows may be one CUDA graph, whose KV is offered as soon as the graph is queued.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows
from outrider.engine.pending import read
from outrider.engine.sampler.logprobs import ScoredSequence, split_scored_rows
from outrider.engine.scheduler import Scheduled, StepPlan
from outrider.engine.step_profiler import StepProfiler
from outrider.engine.step_progress import StepProgress
from outrider.errors import NO_ADAPTER, MismatchError, PeerLostError
from outrider.faults import fault_point
from outrider.kv_transfer.connectors import Connector
from outrider.prefill import TimedPart
from outrider.profile import EndProfile, Part, StartProfile, StepKind
from outrider.service.telemetry.logging import get_logger
from outrider.wire.answer import pack_logprobs
from prefill_node.blending import Blending
from prefill_node.jobs import (
    CancelJob,
    Command,
    HeldPrefixRead,
    JobEnded,
    PrefillJob,
    PushEnded,
    PushOutcome,
    Stop,
)
from prefill_node.push import KvPush, LayerGroups
from prefill_node.push_slots import PushSlots
from prefill_node.pushed_parts import add_part
from prefill_node.statistics import PromptTokens, StepStats
from prefill_node.task import Chunk, PrefillTask, chunk_rows
from prefill_node.turn import PrefillTurn

MAX_PUSHES = 64  # at most 32 go to one decode node; a push has threads in each rank, and may outlast its computation
STOP_SECONDS = 2.0
log = get_logger("prefill_node")


class PrefillLoop:
    """The engine thread, the sole owner of scheduler, pool and cache, except that pushes read pinned blocks.

    Commands arrive through one queue; ended jobs leave through `emit`, which this thread calls.
    """

    def __init__(
        self,
        *,
        engine: PromptEngine,
        connector: Connector,
        frame_bytes: int,
        profiler: StepProfiler,
        emit: Callable[[Sequence[JobEnded], StepStats | None], None],
        cpu_turns: CpuTurns | None = None,
        max_pushes: int = MAX_PUSHES,
    ) -> None:
        """`max_pushes`: maximum number of jobs that are computed or pushed; the others wait (`PushSlots`)."""
        self.progress = StepProgress()
        self.prompt_tokens = PromptTokens()
        self._engine = engine
        self._scheduler = engine.scheduler
        self._connector = connector
        self._layers = LayerGroups.of(engine.kv_cache, frame_bytes=frame_bytes)
        self._profiler = profiler
        self._time = engine.clock
        self._emit = emit
        self._turn = PrefillTurn(
            cpu_turns or CpuTurns(),
            engine.clock,
            self.progress,
            num_layers=self._layers.num_layers,
        )
        self._blending = Blending(engine, self._turn, self.progress)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._tasks: dict[int, PrefillTask] = {}
        self._slots = PushSlots(max_pushes)
        self._chunks: deque[Chunk] = deque()  # launched chunks that are not yet known to be computed, in order
        self._last_end = 0.0  # end of the last chunk, monotonic seconds
        self._ended: list[JobEnded] = []
        self._is_stopped = False

    def submit(self, command: Command) -> None:
        """Queues a command, from any thread."""
        if isinstance(command, PrefillJob):
            self.prompt_tokens.set_outstanding(command.job_id, command.call.max_outstanding_tokens)
        if isinstance(command, Stop):
            self._turn.is_stopping = True
        self._inbox.put(command)

    def run(self) -> None:
        """Runs until `Stop`. An exception from here is a bug."""
        try:
            while not self._is_stopped:
                self.step()
        finally:
            self._turn.give()
        self._profiler.end()

    def step(self) -> None:
        """Runs one iteration. Waits for a command if there is nothing to compute."""
        if self._blending.work():  # a step of its own
            self._schedule()
        self.progress.begin()
        self._take_commands()
        self._answer()  # answers jobs whose push has ended
        plan = self._blending.take(self._plan())
        self._begin(self._tasks[sequence.key] for sequence in plan.admitted)
        needs_logits = any(item.scored_token_ids for item in plan.scheduled)  # the host then waits for the logits
        runs_ahead = self._engine.runner.is_asynchronous and bool(plan.scheduled) and not needs_logits
        was_computing = self._finish_chunks(num_ahead=runs_ahead)
        if plan.scheduled:
            self._launch(plan, runs_ahead=runs_ahead)  # one forward pass, whose layers are offered to pushes
            self._finish_chunks(num_ahead=runs_ahead)  # after this, a fully computed job waits only for its push
        else:
            self._turn.give()
            if not (was_computing or plan.admitted or self._blending.has_work or self._is_stopped):
                self._wait_for_command()
        self.progress.end()

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        assert not plan.preempted, "a job has all its blocks from its admission on"
        self._time.mark(Part.SCHEDULE)
        return plan

    def _report_chunk(self, plan: StepPlan, seconds: float) -> None:
        """Reports a computed chunk to metrics and profiler."""
        stats = StepStats(num_rows=plan.num_rows, seconds=seconds, nanoseconds=self._time.take())
        if self._profiler.is_capturing:
            with self.progress.paused():  # starting or stopping torch's profiler takes seconds, but is not a slow step
                self._profiler.step_ended(
                    stats.nanoseconds, kind=StepKind.PROMPT, num_rows=plan.num_rows, scheduled=plan.scheduled
                )
        self._emit((), stats)
        self._time.mark(Part.EMIT)

    def _wait_for_command(self) -> None:
        with self.progress.paused():
            command = self._inbox.get()
        self._time.mark(Part.IDLE)
        self._handle(command)

    def _answer(self) -> None:
        if self._ended:
            self._emit(tuple(self._ended), None)
            self._ended.clear()
            self._time.mark(Part.EMIT)

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for blocks or for other jobs' pushes. Readable from any thread."""
        return self._scheduler.num_waiting + self._slots.num_waiting

    # ---- commands

    def _take_commands(self) -> None:
        while not self._inbox.empty():  # so `get` does not block: no other thread takes commands
            self._handle(self._inbox.get())
        self._time.mark(Part.COMMANDS)

    def _handle(self, command: Command) -> None:
        match command:
            case PrefillJob():
                self._add(command)
            case CancelJob():
                self._cancel(command.job_id)
            case HeldPrefixRead():
                self._held_prefix_read(command)
            case PushEnded():
                self._end(command.job_id, command.outcome)
            case StartProfile():
                self._profiler.begin(command.capture)
            case EndProfile():
                self._profiler.end(command.capture)
            case Stop():
                self._stop()

    def _add(self, job: PrefillJob) -> None:
        wanted = job.call.options.adapter
        adapter = None if wanted is None else self._engine.find_adapter(wanted)
        if wanted is not None and adapter is None:
            message = f"the prefill node does not have the adapter {wanted}"
            self._ended.append(JobEnded(job.job_id, MismatchError(message, reason=NO_ADAPTER)))
            self.prompt_tokens.set_outstanding(job.job_id, 0)
            return
        task = self._tasks[job.job_id] = PrefillTask.of(job, adapter, self._engine.pool.block_size)
        self._slots.add(task)
        self._schedule()

    def _schedule(self) -> None:
        """Starts the jobs that get a slot."""
        for task in self._slots.take(lambda task: task.blend is None or self._blending.task is None):
            if task.reserve_to_read(self._engine.pool):
                self._start_push(task)  # HeldPrefixRead follows
            elif task.blend is not None:
                self._start_push(task)
                self._blending.start(task)
            else:
                self._scheduler.add(task.sequence)

    def _held_prefix_read(self, command: HeldPrefixRead) -> None:
        """Starts computing the rest of a prompt, or all of it, without queueing, as others may wait for its blocks."""
        if (task := self._tasks.get(command.job_id)) is not None and not task.is_cancelled:
            task.end_reading(has_read=command.has_read)
            self._scheduler.add_running(task.sequence)
            self._begin([task])

    def _cancel(self, job_id: int) -> None:
        task = self._tasks.get(job_id)
        if task is None:
            return  # the job has just ended
        task.is_cancelled = True
        self._stop_computing(task)
        if task.push is None:
            self._forget(task)
        else:
            task.push.interrupt()  # the PushEnded that follows frees the task's blocks

    def _stop(self) -> None:
        self._is_stopped = True
        self._turn.give()  # first, since pushes may take seconds to end
        pushes = [task.push for task in self._tasks.values() if task.push is not None]
        for job_id in list(self._tasks):
            self._ended.append(JobEnded(job_id, PeerLostError("the prefill node is stopping", reason="DRAINING")))
            self._cancel(job_id)
        self._answer()
        deadline = time.monotonic() + STOP_SECONDS
        for push in pushes:
            push.join(max(deadline - time.monotonic(), 0.0))
        while self._tasks and time.monotonic() < deadline:
            try:
                self._handle(self._inbox.get(timeout=max(deadline - time.monotonic(), 0.0)))
            except queue.Empty:
                log.warning("pushes did not end in time", num_tasks=len(self._tasks))

    # ---- one step

    def _begin(self, tasks: Iterable[PrefillTask]) -> None:  # pushes start with the KV in the prefix cache
        for task in tasks:
            sequence = task.sequence
            task.num_cached_tokens = sequence.num_cached_tokens
            push = task.push or self._start_push(task)
            task.give_blocks()
            push.offer(range(self._layers.num_layers), 0, sequence.num_computed)
            push.offer(None, 0, sequence.num_computed)
            self.prompt_tokens.set_outstanding(sequence.key, task.num_outstanding_tokens)
            if sequence.num_uncomputed == 0:
                self._end_compute(task)
        self._time.mark(Part.HAND_OFF)

    def _start_push(self, task: PrefillTask) -> KvPush:
        job_id = task.job.job_id
        return task.start_push(
            self._connector,
            self._engine.kv_cache,
            on_ended=lambda outcome: self._push_ended(job_id, outcome),
            on_read=lambda has_read: self._inbox.put(HeldPrefixRead(job_id, has_read)),
        )

    def _push_ended(self, job_id: int, outcome: PushOutcome) -> None:
        """Queues the end of a push. Called from the push's thread."""
        if outcome.error is None:
            self._turn.kv_has_arrived = True
        self._inbox.put(PushEnded(job_id, outcome))

    def _launch(self, plan: StepPlan, *, runs_ahead: bool) -> None:
        """Launches the forward pass. Publishes its blocks at once, since passes that read them are queued behind it."""
        self._turn.take()
        rows = [row for item in plan.scheduled for row in chunk_rows(item, self._tasks.get(item.sequence.key))]
        if not runs_ahead and (num_rows := sum([len(row.token_ids) for row in rows])):
            self.progress.expect(num_rows)
        age_before = self.progress.age_seconds()
        fault_point("prefill.chunk")
        self._turn.keep()
        launched_at, continues = time.monotonic(), False
        try:
            for sequence, logprobs in self._compute(plan, rows):
                self._tasks[sequence.key].prompt_logprobs.append(pack_logprobs(logprobs))
            self._time.mark(Part.SAMPLING)
            num_ended = sum(item.reaches_end for item in plan.scheduled)
            continues = 0 < num_ended < self._scheduler.num_running + self._scheduler.num_waiting
        finally:
            self._turn.end_chunk(continues=continues)
        for sequence, num_rows, *_ in plan.scheduled:
            assert sequence.kv is not None
            sequence.kv.advance(sequence.num_computed + num_rows)
            task = self._tasks.get(sequence.key)
            sequence.kv.publish(sequence.token_ids if task is None else task.publishable_token_ids)
        end = self._engine.kv_cache.fence() if runs_ahead else None
        self._chunks.append(Chunk(plan, launched_at, self.progress.age_seconds() - age_before, end))
        self._time.mark(Part.COMMIT)

    def _compute(self, plan: StepPlan, rows: Sequence[SequenceRows]) -> Sequence[ScoredSequence]:
        """Runs the forward pass, if there are rows. Returns the requested logprobs."""
        if rows:
            logits = self._engine.forward(
                plan.block_copies, rows, on_layer_done=lambda layer: self._layer_done(plan, layer)
            )
        else:  # all of the chunk's KV is reused
            logits = ()
            self._offer(plan.scheduled, range(self._layers.num_layers))
        self._offer(plan.scheduled, None)
        return read(*split_scored_rows(plan, logits)[1])

    def _layer_done(self, plan: StepPlan, layer: int) -> None:
        """Offers the chunk's KV of a group of layers if `layer` is its last. Called during the forward pass."""
        self._time.mark(Part.FORWARD)
        for item in plan.scheduled:
            if (layers := self._layers.ending_at(layer, num_tokens=item.num_rows)) is not None:
                self._offer((item,), layers)
        if layer < self._layers.num_layers - 1:
            self._turn.yield_turn()

    def _offer(self, scheduled: Iterable[Scheduled], layers: range | None) -> None:
        """Offers the chunk's KV of these layers to the pushes; None stands for the features."""
        for item in scheduled:
            task, start = self._tasks.get(item.sequence.key), item.sequence.num_computed
            if task is not None:  # not a piece of a blended prompt
                assert task.push is not None
                task.push.offer(layers, start, start + item.num_rows)
        self._time.mark(Part.HAND_OFF)

    def _finish_chunks(self, *, num_ahead: int) -> bool:
        """Waits until the device has at most `num_ahead` chunks left. Returns whether it had more before."""
        has_waited = len(self._chunks) > num_ahead
        while len(self._chunks) > num_ahead:
            self._finish(self._chunks[0])
            self._chunks.popleft()
        return has_waited

    def _finish(self, chunk: Chunk) -> None:
        """Waits for the chunk, and records its time and tokens. Jobs that were cancelled meanwhile are skipped."""
        plan, started_at, seconds = chunk.plan, chunk.launched_at, chunk.seconds
        if chunk.end is not None:
            self.progress.expect(plan.num_rows)
            chunk.end.synchronize()
            self._time.mark(Part.FORWARD)
            started_at = max(started_at, self._last_end)
            seconds = time.monotonic() - started_at
        self._last_end = time.monotonic()
        self.prompt_tokens.add_computed(plan.num_rows)
        for item in plan.scheduled:
            task = self._tasks.get(item.sequence.key)
            if task is None or task.is_cancelled:
                self._blending.note_computed(item)
                continue
            add_part(task.chunks, TimedPart(started_at, self._last_end, item.num_rows))
            self.prompt_tokens.set_outstanding(item.sequence.key, task.num_outstanding_tokens)
            if item.reaches_end:
                self._end_compute(task)
        self._time.mark(Part.COMMIT)
        self._report_chunk(plan, seconds)

    def _end_compute(self, task: PrefillTask) -> None:
        self._stop_computing(task)
        task.end_compute()

    # ---- the end of a job

    def _stop_computing(self, task: PrefillTask) -> None:
        """Removes a job from the batch. Blocks that its push may still use stay pinned. Idempotent."""
        self._blending.remove(task)
        task.pin()
        self._scheduler.remove(task.sequence)
        self.prompt_tokens.set_outstanding(task.job.job_id, 0)

    def _end(self, job_id: int, outcome: PushOutcome) -> None:
        """Unpins the blocks of an ended push and answers its job."""
        task = self._tasks.get(job_id)
        assert task is not None, "a task stays until its push has ended"
        self._stop_computing(task)
        self._forget(task)
        if not task.is_cancelled:
            self._ended.append(JobEnded(job_id, outcome.error or task.result(outcome)))

    def _forget(self, task: PrefillTask) -> None:
        if task.pinned is not None:
            task.pinned.free()
        del self._tasks[task.job.job_id]
        self._slots.leave(task)
        self._schedule()
        self.prompt_tokens.set_outstanding(task.job.job_id, 0)
