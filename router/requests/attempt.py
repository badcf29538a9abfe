"""One attempt to compute an answer's unfinished samples on one decode node, as a state machine.

The decode node grants a reservation, a prefill node pushes the prompt's KV to it, tokens arrive, and the
samples end. `Attempt.TABLE` has every transition. If a transfer fails, the reservation stays, and KV is
sent again under a new transfer id. KV that was received before is kept only if its numerics are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from google.rpc import code_pb2

from outrider.errors import NO_ADAPTER, InternalError, InvalidRequestError, PeerLostError
from outrider.node import NodeRole
from outrider.rpc.status import UNREACHABLE
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    PromptLogprobs,
    Rejected,
    RejectReason,
    SampleDone,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
)
from router.nodes.directory import EXACT_NUMERICS
from router.requests import events as on
from router.requests import instructions as do
from router.requests.prompt_logprobs import PromptLogprobsHold
from router.requests.sample_answer import TokenMismatchError
from router.requests.states import NODE_FAULT_CAUSES, AttemptState, InvalidTransitionError, Shared

Handlers = Mapping[type, Callable[["Attempt", Any], on.Outcome | None]]
_NODE_EVENTS = get_args(SequenceGroupEvent)


@dataclass(slots=True, eq=False)
class Attempt:
    """A state machine: `step` takes an event and appends instructions to `Shared.out`."""

    shared: Shared
    decode: on.Node
    prefill: on.Node | None  # node of the current or last transfer; None: no transfer
    opened: OpenSequenceGroup
    hold: PromptLogprobsHold | None  # None: no logprobs of the prompt are missing
    is_hedge: bool
    state: AttemptState = AttemptState.OPENING
    was_granted: bool = False
    has_tokens: bool = False  # whether at least one token has come from this attempt
    is_late: bool = False
    is_draining: bool = False
    is_kv_ready: bool = False
    is_prefill_running: bool = False
    transfer_id: bytes = b""  # id of the current transfer; empty: the decode node computes the prompt
    prefill_numerics: str = ""  # numerics of the last prefill node that was asked; empty: none was asked
    timer: on.Timer | None = None  # the running timer
    running: set[int] = field(default_factory=set)  # samples on the decode node

    def __post_init__(self) -> None:
        self.transfer_id = self.opened.transfer_id
        self.running = {start.sample for start in self.opened.samples}

    @property
    def group_id(self) -> bytes:
        return self.opened.sequence_group_id

    @property
    def is_in_doubt(self) -> bool:
        return self.is_late or self.is_draining

    @property
    def has_exact_numerics(self) -> bool:
        """Whether another attempt on nodes of these numerics computes the same tokens."""
        numerics = self.decode.numerics
        return numerics.startswith(EXACT_NUMERICS) and (self.prefill is None or self.prefill.numerics == numerics)

    def step(self, event: Any) -> on.Outcome | None:
        """Takes an event. Returns the outcome of the event for the request, or None if there is no outcome.

        The attempt is lost if its node breaks the protocol. Raises: InvalidTransitionError if an event of the router
        itself has no transition in this state.
        """
        handler = self.TABLE[self.state].get(type(event))
        try:
            if handler is None:
                raise InvalidTransitionError(self.state, event)
            return handler(self, event)
        except TokenMismatchError as error:
            return on.Lost(self._error(error.message), "token_mismatch")
        except InternalError as error:
            if handler is None and not isinstance(event, _NODE_EVENTS):
                raise
            return on.Lost(self._error(error.message), "protocol")

    def open(self, place: Any) -> None:
        self._do(do.OpenGroup(self.opened, place))
        self._set_timer(on.Timer.GRANT, self.shared.limits.open_timeout_seconds)

    def close(
        self, why: str, *, rejected: Rejected | None = None, frees_hedge: bool = False, keeps_prefill: bool = False
    ) -> None:
        """Releases everything. `keeps_prefill`: a running prefill call goes on until `close` is called without it."""
        if self.state is not AttemptState.COMPLETED:
            self._stop_timer()
            frees_hedge = frees_hedge and self.is_hedge and not self.has_tokens
            self._do(do.CloseAttempt(self.group_id, why, bool(self.running), rejected, frees_hedge))
        self.state = AttemptState.COMPLETED
        if not keeps_prefill:
            self._stop_prefill()

    def cancel_ended_samples(self) -> on.Outcome | None:
        """Cancels samples that the node still computes although they have ended in the router's answer."""
        if self.hold is not None:  # the prompt's logprobs are still missing
            return None
        samples = self.shared.answer.samples
        ended = tuple(sample for sample in sorted(self.running) if samples[sample].finished)
        if not ended:
            return None
        self._do(do.CancelSamples(self.group_id, ended))
        return self._discard(*ended)

    def blame(self, role: NodeRole, incarnation: bytes, cause: str) -> None:
        """Blames a node that failed the attempt. A request that fails on two nodes is itself at fault."""
        suspects, may_be_request = self.shared.failures.suspects, cause not in NODE_FAULT_CAUSES
        self._do(do.Blame(self.group_id, role, incarnation, may_be_request))
        if may_be_request:
            suspects.add(incarnation)
            if len(suspects) > 1:
                self._do(do.Forgive(tuple(sorted(suspects))))

    # ------------------------------------------------------------ the reservation and its KV

    def _take_grant(self, granted: Granted) -> on.Outcome | None:
        if granted.transfer_id != self.transfer_id:
            if not self.was_granted:
                raise InternalError("it granted another transfer")
            return None
        self._stop_timer()
        self._do(do.RecordGrant(self.group_id, granted))
        self.was_granted = self.shared.was_admitted = True
        self.shared.answer.begin()
        if not granted.kv_address:
            self._start_decoding()
        elif self.prefill is None or not self.shared.failures.may_transfer:
            self._retarget()
        else:
            may_read_held = bool(self.prefill_numerics) and self._keeps_received()
            self.prefill_numerics = self.prefill.numerics
            self.state, self.is_prefill_running = AttemptState.TRANSFERRING, True
            self._do(do.StartPrefill(self.group_id, granted, may_read_held))
        return None

    def _take_rejection(self, rejected: Rejected) -> on.Outcome:
        self.running.clear()
        if rejected.reason is RejectReason.INVALID:
            message = f"decode node {self.decode.name} rejected the request as invalid: {rejected.message}"
            return on.Fatal(InternalError(message))
        return on.Refused(rejected)

    def _take_silence(self, _event: on.TimerFired) -> on.Outcome:
        self.timer = None
        command = "RetargetSequenceGroup" if self.was_granted else "OpenSequenceGroup"
        seconds = self.shared.limits.open_timeout_seconds
        return on.Lost(self._error(f"no answer to {command} within {seconds:g} s"), "decode_silent")

    def _take_kv(self, ready: KvReady) -> on.Outcome | None:
        """Records that the reservation has its KV, perhaps from a transfer that was abandoned."""
        self._do(do.RecordKv(self.group_id, ready))
        self.is_kv_ready = True
        if self.hold is None:
            self._start_decoding()
        elif self.state is AttemptState.RETARGETING:
            return on.Lost(self._error("the prompt's logprobs are lost"), "prefill_lost", is_counted=False)
        elif self.is_prefill_running:  # the prefill node's response has the logprobs
            self._set_timer(on.Timer.KV, self.shared.limits.kv_ready_timeout_seconds)
        else:
            return self._fail_transfer("the prefill node has not sent all logprobs of the prompt")
        return None

    def _take_prefill(self, event: on.PrefillEnded) -> on.Outcome | None:
        self.is_prefill_running = False
        if isinstance(event.result, PeerLostError):
            return self._fail_transfer(event.result)
        try:
            has_logprobs = self.hold is not None and self.hold.take(event.result.prompt_logprobs)
        except InternalError as error:
            return self._fail_transfer(error.message)
        outcome = self._end_hold() if has_logprobs else None
        if not self.is_kv_ready:  # all KV was pushed, so the decode node's KvReady follows
            self._set_timer(on.Timer.KV, self.shared.limits.kv_ready_timeout_seconds)
        elif self.hold is None:
            self._start_decoding()
        else:
            return self._fail_transfer("the prefill node has not sent all logprobs of the prompt")
        return outcome

    def _fail_kv(self, event: KvFailed) -> on.Outcome | None:
        if event.transfer_id != self.transfer_id:
            return None
        return self._fail_transfer(f"the KV transfer from {self._prefill.name} failed: {event.message}")

    def _leave_late_prefill(self, _event: on.PrefillLate) -> on.Outcome | None:
        return self._fail_transfer(f"prefill node {self._prefill.name} is late")

    def _miss_kv(self, _event: on.TimerFired) -> on.Outcome | None:
        self.timer = None
        return self._fail_transfer(f"the prompt's KV or logprobs did not arrive from {self._prefill.name} in time")

    @property
    def _prefill(self) -> on.Node:
        assert self.prefill is not None, "a transfer has a prefill node"
        return self.prefill

    def _fail_transfer(self, why: PeerLostError | str) -> on.Outcome | None:
        prefill, failures = self._prefill, self.shared.failures
        if self.hold is not None:
            self.hold.forget()
        error = why if isinstance(why, PeerLostError) else PeerLostError(why, node=prefill.name)
        self._stop_prefill()
        self._stop_timer()
        failures.reset_on_progress(self.shared.answer.num_generated_tokens)
        is_unloaded = error.reason == NO_ADAPTER
        if not is_unloaded:  # which is nobody's fault
            failures.add_transfer(prefill.incarnation)
            if error.reason == UNREACHABLE:
                failures.add_node(prefill.incarnation)
            self.blame(NodeRole.PREFILL, prefill.incarnation, error.reason)
        # If the KV is ready, the failed call had to return the prompt's logprobs, which are lost now.
        if failures.final_error(error) is not None or self.is_kv_ready:
            return on.Lost(error, "prefill_lost", is_counted=False)
        if not is_unloaded:
            self._do(do.RecordMigration(prefill.name, "prefill_lost", error))
        self._retarget()
        return None

    def _retarget(self) -> None:
        self.state = AttemptState.RETARGETING
        failures = self.shared.failures
        if self.prefill is not None and failures.may_transfer:
            self._do(do.ChoosePrefill(self.group_id, failures.avoided))
        else:
            self._send_retarget(on.PrefillChosen(self.group_id, None))

    def _send_retarget(self, event: on.PrefillChosen) -> None:
        self.prefill = event.prefill
        self.transfer_id = b"" if event.prefill is None else self.shared.limits.new_id()
        self._do(do.Retarget(self.group_id, self.transfer_id, self._keeps_received()))
        self._set_timer(on.Timer.GRANT, self.shared.limits.open_timeout_seconds)

    def _keeps_received(self) -> bool:
        """Whether received KV may stay: the next node has equal numerics, and the prompt is not scored or blended."""
        node, options = self.decode if self.prefill is None else self.prefill, self.opened.options
        return self.prefill_numerics == node.numerics and options.prompt_logprobs is None and options.blend is None

    def _start_decoding(self) -> None:
        self.state = AttemptState.DECODING
        self._stop_timer()
        self._do(do.ReleasePrefill(self.group_id))

    # ------------------------------------------------------------ tokens and ends

    def _take_tokens(self, tokens: SampleTokens) -> on.Outcome | None:
        if self.hold is not None:
            self.hold.add(tokens, has_kv=self.is_kv_ready)
            return None
        answer, is_first = self.shared.answer, not self.has_tokens
        self.has_tokens = True
        num_new, has_ended = answer.take(tokens)
        self._do(do.Deliver(tokens, num_new, is_first))
        if not has_ended:
            return on.Changed() if is_first else None
        finished = answer.samples[tokens.sample].finished
        if finished is not None and finished.stop_string is not None:  # the node does not know stop strings
            return self.cancel_ended_samples() or on.Changed()
        return self._discard(tokens.sample) or on.Changed()

    def _take_done(self, done: SampleDone) -> on.Outcome | None:
        if self.hold is not None:
            self.hold.add(done, has_kv=self.is_kv_ready)
            return None
        self.shared.answer.finish(done)
        return self._discard(done.sample) or on.Changed()

    def _take_own_logprobs(self, event: PromptLogprobs) -> on.Outcome | None:
        """Takes the prompt's logprobs from a decode node that computes the prompt itself."""
        has_logprobs = self.hold is not None and self.hold.take(event.packed)
        return self._end_hold() if has_logprobs else None

    def _end_hold(self) -> on.Outcome:
        """Takes the tokens that were held back, now that the prompt's logprobs are complete."""
        hold, self.hold = self.hold, None
        assert hold is not None, "the logprobs were missing"
        self.shared.answer.take_prompt_logprobs(hold.packed)
        outcome = self.cancel_ended_samples()
        for event in hold.waiting:
            if event.sample in self.running:
                outcome = self._take_tokens(event) if isinstance(event, SampleTokens) else self._take_done(event)
        return outcome or on.Changed()  # the answer may be complete by now

    def _discard(self, *samples: int) -> on.Outcome | None:
        self.running.difference_update(samples)
        return None if self.running else on.Completed()

    def _take_failure(self, event: SequenceGroupFailed) -> on.Outcome:
        self.running.clear()
        if event.code == code_pb2.INVALID_ARGUMENT:
            field_at_fault = self.shared.answer.request.options.sampling.field_at_fault
            return on.Fatal(InvalidRequestError(event.message, field=field_at_fault))
        return on.Lost(self._error(event.message), "group_failed")

    def _take_session_loss(self, event: on.SessionLost) -> on.Outcome:
        self.running.clear()
        return on.Lost(event.error, "decode_lost", is_counted=not self.is_draining)

    def _take_change(self, event: on.DecodeNodeChanged) -> on.Outcome:
        self.is_late, self.is_draining = event.is_late, event.is_draining
        return on.Changed()

    def _take_stats(self, _event: on.PrefillEnded) -> on.Outcome:
        self.is_prefill_running = False
        return on.Changed()

    def _ignore(self, _event: object) -> None:
        """Does nothing, because the event belongs to an abandoned transfer or came too late to matter."""

    def _error(self, message: str) -> PeerLostError:
        return PeerLostError(f"decode node {self.decode.name}: {message}", node=self.decode.name)

    def _stop_prefill(self) -> None:
        if self.is_prefill_running:
            self.is_prefill_running = False
            self._do(do.StopPrefill(self.group_id))

    def _set_timer(self, timer: on.Timer, seconds: float) -> None:
        self.timer = timer
        self._do(do.SetTimer(timer, self.shared.now + seconds, self.group_id))

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self._do(do.StopTimer(self.timer, self.group_id))
            self.timer = None

    def _do(self, instruction: do.Instruction) -> None:
        self.shared.out.append(instruction)

    _ANYTIME: ClassVar[Handlers] = {
        SequenceGroupFailed: _take_failure,
        on.SessionLost: _take_session_loss,
        on.DecodeNodeChanged: _take_change,
    }
    TABLE: ClassVar[Mapping[AttemptState, Handlers]] = {
        AttemptState.OPENING: {
            **_ANYTIME,
            Granted: _take_grant,
            Rejected: _take_rejection,
            on.TimerFired: _take_silence,
        },
        AttemptState.TRANSFERRING: {
            **_ANYTIME,
            Granted: _ignore,
            KvReady: _take_kv,
            KvFailed: _fail_kv,
            on.PrefillEnded: _take_prefill,
            on.PrefillLate: _leave_late_prefill,
            on.TimerFired: _miss_kv,
            SampleTokens: _take_tokens,  # tokens are held back until the prompt's logprobs are complete
            SampleDone: _take_done,
        },
        AttemptState.RETARGETING: {
            **_ANYTIME,
            on.PrefillChosen: _send_retarget,
            Granted: _take_grant,
            KvReady: _take_kv,
            KvFailed: _ignore,
            on.PrefillLate: _ignore,
            on.TimerFired: _take_silence,
        },
        AttemptState.DECODING: {
            **_ANYTIME,
            SampleTokens: _take_tokens,
            SampleDone: _take_done,
            PromptLogprobs: _take_own_logprobs,
            Granted: _ignore,
            KvReady: _ignore,
            KvFailed: _ignore,
            on.PrefillEnded: _take_stats,
            on.PrefillLate: _ignore,
        },
        AttemptState.COMPLETED: {on.PrefillEnded: _take_stats},
    }
    """All transitions. Any other event is a protocol error if the decode node sent it, else an internal error."""
