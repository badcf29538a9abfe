"""READ FIRST. One request's life as a state machine, from its arrival to the end of its resume window.

`Request.step` takes an event and returns instructions. It does no I/O and has neither a clock nor
tasks: `router.requests.driver` feeds it events and performs its instructions. `Request.TABLE` has every
transition; those of an attempt are in `Attempt.TABLE`.

Tokens depend only on the model, the prompt, the parameters and the seed. After a loss, another attempt
therefore continues from the answer's tokens. On nodes of equal exact numerics two attempts may run at once:
the first token received for a position is used, and a second one is compared with it. If drafts are not
verified by coupled sampling, tokens depend on drafts too, so only one attempt runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from outrider.errors import AbortedError, InternalError, InvalidRequestError, PeerLostError
from outrider.node import NodeRole
from outrider.session import OpenSequenceGroup, Rejected, RejectReason, SampleStart
from router.requests import events as on
from router.requests import instructions as do
from router.requests.answer import Answer
from router.requests.attempt import Attempt
from router.requests.prompt_logprobs import PromptLogprobsHold
from router.requests.states import Cluster, InvalidTransitionError, Limits, Seeking, Shared, State
from router.scheduling.placement import Demand

Handlers = Mapping[type, Callable[["Request", Any], None]]
RETRY_SECONDS = 0.1
"""Seconds between searches for a second decode node while the first one is late or drains."""
STATS_SECONDS = 0.5
"""Seconds that a finished answer waits for the statistics of a prefill node."""


class Request:
    """One request. The caller of `step` performs all instructions that it returns, in order."""

    def __init__(self, limits: Limits, cluster: Cluster) -> None:
        self.state = State.ENCODING
        self.has_reader = False
        self.attempts: list[Attempt] = []  # Invariant: at most two, of equal exact numerics; the older first.
        self.shared = Shared(limits)
        self._cluster = cluster
        self._completed: Attempt | None = None  # the last attempt that completed. Invariant: not in `attempts`.
        self._seeking: Seeking | None = None  # Invariant: None while two attempts run.
        self._bypasses_limits = self._is_undisplaceable = False  # see `do.Enqueue`
        self._timers: set[on.Timer] = set()  # the running ones

    @property
    def answer(self) -> Answer:
        return self.shared.answer

    def step(self, event: on.Event, now: float) -> list[do.Instruction]:
        """Takes an event and returns instructions. `now`: monotonic seconds.

        An event of an attempt that has ended is dropped here and nowhere else. Raises: InvalidTransitionError.
        """
        out: list[do.Instruction] = []
        self.shared.now, self.shared.out = now, out
        group_id = getattr(event, "sequence_group_id", b"")
        if not group_id:
            handler = self.TABLE[self.state].get(type(event))
            if handler is None:
                raise InvalidTransitionError(self.state, event)
            handler(self, event)
            return out
        for attempt in self.attempts:
            if attempt.opened.sequence_group_id == group_id:
                if (outcome := attempt.step(event)) is not None:
                    self._take_outcome(attempt, outcome)
                return out
        completed = self._completed
        if completed is not None and completed.group_id == group_id and isinstance(event, on.PrefillEnded):
            completed.step(event)
            if self.state is State.CONCLUDING:
                self._finish()
        return out

    def crash(self, error: InternalError, now: float) -> list[do.Instruction]:
        """Ends the request after an internal error.

        Returns the failed step's instructions and those that release everything that the request holds.
        """
        self.shared.now = now
        if self.state is State.ENCODING:
            self._close(on.Dropped(error))
        elif self.state is not State.CLOSED:
            self._end(on.Failed(error))
        return self.shared.out

    # ----------------------------------------------------------- outcomes of attempts

    def _take_outcome(self, attempt: Attempt, outcome: on.Outcome) -> None:
        match outcome:
            case on.Completed():
                self._complete(attempt)
            case on.Refused(rejected):
                self._take_refusal(attempt, rejected)
            case on.Lost():
                self._take_loss(attempt, outcome)
            case on.Fatal(error):
                self.attempts.remove(attempt)
                attempt.close(error.reason)  # without the message, which is in the request's failure
                self._end(on.Failed(error))
        self._advance()

    def _complete(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        attempt.close("", keeps_prefill=True)
        self._completed = attempt

    def _take_refusal(self, attempt: Attempt, rejected: Rejected) -> None:
        """Returns the request to its turn in the queue, unless no node can ever take it."""
        reason = rejected.reason
        self.attempts.remove(attempt)
        is_of_node = reason in {RejectReason.NO_ROOM, RejectReason.DRAINING, RejectReason.NO_ADAPTER}
        attempt.close(f"{reason.name}: {rejected.message}", rejected=rejected if is_of_node else None, frees_hedge=True)
        self._bypasses_limits |= self.shared.was_admitted
        self._is_undisplaceable = self.shared.was_admitted  # a request that never had a grant may be displaced again
        if reason is RejectReason.TOO_LARGE:
            self.shared.excluded |= {attempt.decode.incarnation}
            if self.attempts or self._cluster.is_usable(self.shared.demand()):
                return
            if not self._cluster.awaits_decode_nodes:
                self._end(on.Failed(InvalidRequestError(rejected.message, field="prompt", reason="TOO_LARGE")))
            elif not self.shared.was_admitted:  # otherwise it waits for a node as large as the one that granted room
                message = f"too large for the decode nodes that serve now: {rejected.message}"
                self._end(on.Failed(PeerLostError(message, reason="NO_NODE")))

    def _take_loss(self, attempt: Attempt, lost: on.Lost) -> None:
        """Continues from the answer's tokens, unless too many nodes were lost."""
        failures, is_second = self.shared.failures, attempt is not self.attempts[0]
        failures.reset_on_progress(self.answer.num_generated_tokens)
        if lost.is_counted:
            attempt.blame(NodeRole.DECODE, attempt.decode.incarnation, lost.cause)
            failures.add_node(attempt.decode.incarnation)
        self.attempts.remove(attempt)
        attempt.close(f"{lost.cause}: {lost.error.message}", frees_hedge=True)
        final = None if self.attempts else failures.final_error(lost.error)
        if final is not None:
            self._do(do.Forgive(tuple(sorted(failures.suspects))))
            self._end(on.Failed(final))
        elif not is_second:  # the loss of a second attempt is no migration
            self._bypasses_limits = True  # the request was admitted before, so the queue must not reject it
            self._do(do.RecordMigration(attempt.decode.name, lost.cause, lost.error))

    # ----------------------------------------------------------- next steps

    def _advance(self) -> None:
        """Ends one of two attempts if the other is enough. Seeks another attempt if it is needed."""
        if self.state not in {State.QUEUED, State.SERVING}:
            return
        if len(self.attempts) == 2:
            older, newer = self.attempts
            if not older.is_in_doubt:
                self._drop_attempt(newer)
            elif newer.has_tokens:
                self._drop_attempt(older)
                cause = "draining" if older.is_draining else "decode_late"
                self._do(do.RecordMigration(older.decode.name, cause))
            elif not self.answer.is_complete:
                for attempt in (older, newer):  # a sample may have ended in the other attempt
                    if isinstance(attempt.cancel_ended_samples(), on.Completed):
                        self._complete(attempt)
        if self.answer.is_complete:
            self._conclude()
        elif not self.attempts:
            self._seek_first()
        elif len(self.attempts) == 1:
            self._seek_second(self.attempts[0])

    def _seek_first(self) -> None:
        self.state = State.QUEUED
        if self._completed is not None:
            self._end(on.Failed(InternalError("a decode node has ended all samples, but some are unfinished")))
        elif self._seeking is None:
            self._enqueue(Seeking.FIRST, self.shared.demand())
        elif self._seeking is Seeking.SECOND:  # the first attempt has ended meanwhile
            self._seeking = Seeking.FIRST
            self._do(do.ChangeDemand(self.shared.demand()))

    def _seek_second(self, first: Attempt) -> None:
        """Seeks a second attempt if the first one's node is late or drains, and both would compute the same tokens."""
        is_reproducible = self.answer.request.options.is_reproducible and first.has_exact_numerics
        if not (first.is_in_doubt and is_reproducible):
            self._leave_queue()
            return
        if self._seeking is not None:
            return
        failures, demand = self.shared.failures, self.shared.demand(alongside=first.decode)
        failures.reset_on_progress(self.answer.num_generated_tokens)
        if not (failures.may_open_second and self._cluster.has_decode_node_on_time(demand)):
            self._set_timer(on.Timer.RETRY, RETRY_SECONDS)
        elif first.is_draining:
            self._bypasses_limits = True
            self._enqueue(Seeking.SECOND, demand)
        else:
            self._seeking = Seeking.HEDGE
            self._do(do.Hedge(demand, first.group_id))

    def _enqueue(self, seeking: Seeking, demand: Demand) -> None:
        self._seeking = seeking
        self._do(do.Enqueue(demand, bypasses_limits=self._bypasses_limits, is_undisplaceable=self._is_undisplaceable))

    def _leave_queue(self) -> None:
        seeking, self._seeking = self._seeking, None
        if seeking in {Seeking.FIRST, Seeking.SECOND}:
            self._do(do.LeaveQueue())

    # ------------------------------------------------------------ events of the request

    def _begin(self, event: on.Encoded) -> None:
        self.shared.maybe_answer = event.answer
        self.shared.was_admitted = self._bypasses_limits = self._is_undisplaceable = event.was_admitted
        self.state = State.QUEUED
        self._advance()

    def _open(self, event: on.Placed) -> None:
        if self._seeking is None or event.is_hedge != (self._seeking is Seeking.HEDGE):
            self._return_place(event)
            return
        self._seeking = None
        self._is_undisplaceable = True
        answer, request = self.answer, self.answer.request
        hold = PromptLogprobsHold(len(request.prompt_token_ids) - 1) if answer.needs_prompt_logprobs else None
        command = OpenSequenceGroup(
            sequence_group_id=self.shared.limits.new_id(),
            transfer_id=b"" if event.prefill is None else self.shared.limits.new_id(),
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            # If only prompt logprobs are missing, no sample is unfinished, so sample 0 is started.
            samples=answer.unfinished_samples() or (SampleStart(sample=0),),
            options=replace(
                request.options,
                cache_salt=event.kv_salt,
                prompt_logprobs=None if hold is None else request.options.prompt_logprobs,
            ),
        )
        attempt = Attempt(self.shared, event.decode, event.prefill, command, hold, event.is_hedge)
        self.attempts.append(attempt)
        self.state = State.SERVING
        attempt.open(event.place)

    def _return_place(self, event: on.Placed) -> None:
        self._do(do.ReturnPlace(event.place))

    def _take_no_place(self, event: on.NotPlaced) -> None:
        if self._seeking is None or (event.error is None) != (self._seeking is Seeking.HEDGE):
            return  # this search was given up
        self._seeking = None
        if self.attempts:  # the running attempt stays where it is
            self._set_timer(on.Timer.RETRY, RETRY_SECONDS)
        elif event.error is not None:
            self._end(on.Failed(event.error))
        else:  # the late attempt has ended meanwhile
            self._advance()

    def _take_timer(self, event: on.TimerFired) -> None:
        self._timers.discard(event.timer)
        match event.timer:
            case on.Timer.STATS:
                self._finish()
            case on.Timer.WINDOW:
                self._close(on.Dropped())
            case _:
                self._advance()

    def _abort(self, _event: on.AbortRequested) -> None:
        self.answer.abort()
        self._free()
        self._conclude()

    def _attach(self, _event: on.ReaderAttached) -> None:
        self.has_reader = True
        self._stop_timer(on.Timer.WINDOW)

    def _attach_late(self, _event: on.ReaderAttached) -> None:
        """Fails an unfinished answer, so that its client gets the tokens so far and then an error."""
        self.answer.fail(dropped())

    def _detach(self, _event: on.ReaderLeft) -> None:
        """Begins the resume window, unless another stream is reading. Frees the key of a rejected request at once."""
        self.has_reader = self.answer.has_reader
        if self.has_reader:
            return
        was_refused = self.answer.failure is not None and self.answer.started is None
        if self.shared.limits.window_seconds is None or was_refused:
            self._close(on.Dropped())
        else:
            self._set_timer(on.Timer.WINDOW, self.shared.limits.window_seconds)

    def _ignore(self, _event: object) -> None:
        """Does nothing, because the event came too late to matter."""

    # ------------------------------------------------------------ ends

    def _conclude(self) -> None:
        """Ends the work on a complete answer. Waits up to `STATS_SECONDS` for statistics of the last prefill call."""
        self.state = State.CONCLUDING
        self._do(do.RecordEnd())
        for attempt in tuple(self.attempts):
            if self._completed is None:
                self._complete(attempt)
            else:
                self._drop_attempt(attempt)
        self._leave_queue()
        self._stop_timer(on.Timer.RETRY)
        if self._completed is not None and self._completed.is_prefill_running:
            self._set_timer(on.Timer.STATS, STATS_SECONDS)
        else:
            self._finish()

    def _finish(self) -> None:
        self._free()
        self.answer.begin()
        self.state = State.ENDED
        self._do(do.Summarize())
        self._do(do.SettleRequest())

    def _end(self, event: on.Failed) -> None:
        """Fails the request. The tokens so far can be read until the resume window ends."""
        was_active, self.state = self.state.is_active, State.ENDED
        self._free()
        if was_active:
            self.answer.fail(event.error)
            self._do(do.SettleRequest())

    def _close(self, event: on.Dropped) -> None:
        error, was_active, self.state = event.error, self.state.is_active, State.CLOSED
        self._free()
        if self.shared.maybe_answer is not None and (error is not None or self.answer.has_reader):
            self.answer.fail(error or dropped())  # a waiting reader gets the error
        if was_active:
            self._do(do.SettleRequest())
        self._stop_timer(on.Timer.WINDOW)
        self._do(do.FreeKey(has_client_left=was_active and error is None))

    def _free(self) -> None:
        """Releases everything on nodes and in the queue."""
        for attempt in tuple(self.attempts):
            self._drop_attempt(attempt)
        if self._completed is not None:
            self._completed.close("")
        self._leave_queue()
        self._stop_timer(on.Timer.RETRY)
        self._stop_timer(on.Timer.STATS)

    def _drop_attempt(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        attempt.close("given up" if attempt.running else "")

    def _set_timer(self, timer: on.Timer, seconds: float) -> None:
        if timer not in self._timers:
            self._timers.add(timer)
            self._do(do.SetTimer(timer, self.shared.now + seconds))

    def _stop_timer(self, timer: on.Timer) -> None:
        if timer in self._timers:
            self._timers.remove(timer)
            self._do(do.StopTimer(timer))

    def _do(self, instruction: do.Instruction) -> None:
        self.shared.out.append(instruction)

    _READABLE: ClassVar[Handlers] = {
        on.ReaderAttached: _attach,
        on.ReaderLeft: _detach,
        on.TimerFired: _take_timer,
        on.Dropped: _close,
    }
    _WORKING: ClassVar[Handlers] = {
        **_READABLE,
        on.Placed: _open,
        on.NotPlaced: _take_no_place,
        on.AbortRequested: _abort,
        on.Failed: _end,
    }
    _OVER: ClassVar[Handlers] = {
        on.Placed: _return_place,
        on.NotPlaced: _ignore,
        on.AbortRequested: _ignore,
        on.Failed: _ignore,
    }
    TABLE: ClassVar[Mapping[State, Handlers]] = {
        State.ENCODING: {**_OVER, on.Encoded: _begin, on.Dropped: _close},  # no attempt yet
        State.QUEUED: _WORKING,
        State.SERVING: _WORKING,
        State.CONCLUDING: {**_READABLE, **_OVER},
        State.ENDED: {**_READABLE, **_OVER},
        State.CLOSED: {**_OVER, on.ReaderAttached: _attach_late, on.ReaderLeft: _ignore, on.Dropped: _ignore},
    }
    """All transitions. Any other event in a state is an internal error (`InvalidTransitionError`)."""


def dropped() -> AbortedError:
    return AbortedError("the answer was dropped", reason="DROPPED")
