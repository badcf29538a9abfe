"""Continues a Generate stream after a failed call: chooses the next router, call and time.

A request with a resume window is resumed, on its router first and then on the others, until
its window has passed. If a router does not know the request (because the first router died
before storing it, or there is no shared store), the request is sent again, with the tokens that
have arrived and the seed and adapter of Started. A request without a window is sent again only if
nothing of its answer has arrived.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from outrider.client.record import StreamRecord, StreamRequest
from outrider.client.retry import Attempts
from outrider.client.targets import Targets
from outrider.errors import (
    POISON_REQUEST,
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    NotFoundError,
    NotSupportedError,
    OutriderError,
    PeerLostError,
)
from outrider.rpc.status import UNREACHABLE
from outrider.v1 import router_pb2

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """The next call of a stream."""

    target: str
    request: router_pb2.GenerateRequest | router_pb2.ResumeRequest
    pause_seconds: float = 0.0  # before the call

    @property
    def method(self) -> str:
        return "Resume" if isinstance(self.request, router_pb2.ResumeRequest) else "Generate"


class Continuation:
    """Chooses the calls of one stream. Not thread-safe."""

    def __init__(
        self,
        record: StreamRecord,
        wanted: StreamRequest,
        *,
        targets: Targets,
        attempts: Attempts,
    ) -> None:
        self._record = record
        self._request = wanted.request
        self._window_seconds = wanted.resume_window_seconds
        self._targets = targets
        self._attempts = attempts
        self._num_events = 0  # the record's number of events when the last call began
        self._num_failures = 0  # since the last event
        self._lost_at: float | None = None  # time of the first lost call since the last event; set only if resumable
        self._not_before: dict[str, float] = {}  # by target: the monotonic time before which it must not be called
        self._is_draining = False  # whether a router has reported, since the last event, that it is draining
        self._is_over = False  # whether the request was rejected, or resumed by another stream
        self.step = Step(targets.current, self._resume() if wanted.request is None else wanted.request)

    @property
    def needs_abort(self) -> bool:
        """Whether a router would go on computing the answer although nobody reads it."""
        return self._window_seconds is not None and not self._record.is_complete and not self._is_over

    def next_after(self, error: OutriderError) -> Step:
        """Returns the call that follows a failed one. Raises: `error` if the stream cannot continue."""
        if self._record.num_events > self._num_events:  # events have arrived since the last call
            self._num_events = self._record.num_events
            self._num_failures, self._lost_at, self._is_draining = 0, None, False
            self._targets.current = self.step.target
        try:
            resumable = self._window_seconds is not None
            self.step = self._resume_after(error) if resumable else self._restart_after(error)
            remaining = self._attempts.remaining_seconds()
            if remaining is not None and self.step.pause_seconds >= remaining:
                raise error
        except OutriderError:
            is_late = isinstance(error, AbortedError) and error.reason == "DEADLINE_EXCEEDED"
            self._is_over = not is_late and (isinstance(error, AbortedError) or not self._record.has_started)
            raise
        return self.step

    # ------------------------------------------------------------ with a resume window

    def _resume_after(self, error: OutriderError) -> Step:
        assert self._window_seconds is not None
        if error.reason == POISON_REQUEST:
            raise error
        step, is_first = self.step, self._lost_at is None
        if is_first and isinstance(error, CapacityError) and not self._record.has_started:
            return self._next_attempt(error, step.target)  # rejected, not lost
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if time.monotonic() - self._lost_at > self._window_seconds:
            raise error
        if step.method == "Resume" and isinstance(error, (NotFoundError, NotSupportedError)):
            return self._resend(error)
        if isinstance(error, AlreadyRunningError) and not is_first:
            return self._paused(step.target, self._resume())  # an earlier call has reached the router after all
        was_cancelled_there = isinstance(error, AbortedError) and error.reason == "CANCELLED"  # the router is stopping
        if not isinstance(error, (PeerLostError, CapacityError)) and not was_cancelled_there:
            raise error
        self._is_draining |= error.reason == "DRAINING"
        no_router_answers = not self._record.has_started and self._num_failures >= len(self._targets)
        if no_router_answers and not self._is_draining:
            self._num_failures, self._lost_at = 0, None
            return self._next_attempt(error, step.target)  # no router could be reached
        if is_first and not isinstance(error, CapacityError) and error.reason != "DRAINING":
            return self._paused(step.target, self._resume())  # perhaps only the connection broke
        if isinstance(error, (PeerLostError, CapacityError)) and error.reason != UNREACHABLE:  # the router answered
            self._not_before[step.target] = time.monotonic() + error.retry_after_seconds
        return self._paused(self._targets.after(step.target), self._resume())

    def _paused(self, target: str, request: router_pb2.ResumeRequest) -> Step:
        """Returns a step that makes the call after a pause.

        The pause is the time that the router asked for, but at most the rest of the resume window. Once every target
        has been tried, the pause is at least a backoff.
        """
        assert self._window_seconds is not None
        self._num_failures += 1
        num_pauses = self._num_failures - len(self._targets)
        now, seconds = time.monotonic(), 0.0
        if num_pauses > 0:
            seconds = min(_FIRST_PAUSE_SECONDS * 2.0 ** (num_pauses - 1), _LONGEST_PAUSE_SECONDS)
            seconds *= random.uniform(0.75, 1.25)  # noqa: S311 no secret
        asked = (self._not_before.get(target, now) - now) * random.uniform(1.0, 1.25)  # noqa: S311 no secret
        left = self._window_seconds - (now - (self._lost_at or now))
        return Step(target, request, max(seconds, min(asked, left), 0.0))

    def _resume(self) -> router_pb2.ResumeRequest:
        return router_pb2.ResumeRequest(
            request_id=self._record.request_id, next_positions=self._record.next_positions()
        )

    def _resend(self, error: OutriderError) -> Step:
        """Returns a call that sends the request again, since the router does not know it.

        Raises: `error` if this stream does not have the request, or if a part of the answer has arrived and `n` > 1.
        """
        record = self._record
        if self._request is None:
            raise error
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if record.has_started:
            request.sampling.seed = record.started.seed
            request.adapter_fingerprint = record.started.adapter_fingerprint
            request.output.ClearField("prompt_logprobs")  # they have arrived
        if record.has_deltas:
            if request.sampling.n > 1:
                error.add_note("a part of the answer has arrived, and only a request with n = 1 can be sent again then")
                raise error
            request.generated_token_ids.extend(record.token_ids())
            record.is_resent = True
        return Step(self.step.target, request)

    # ------------------------------------------------------------ without a resume window

    def _restart_after(self, error: OutriderError) -> Step:
        record, request = self._record, self._request
        if record.has_deltas or request is None:
            if isinstance(error, PeerLostError):
                error.add_note(
                    f"{record.num_tokens} tokens had arrived of a request without a resume window: to continue, send "
                    "it again with these tokens as generated_token_ids, and with the seed and adapter_fingerprint of "
                    "Started"
                )
            raise error
        if isinstance(error, PeerLostError) and error.reason == UNREACHABLE:
            self._num_failures += 1
            target = self._targets.after(self.step.target)
            if self._num_failures % len(self._targets):  # there is an untried target
                record.discard_started()
                return Step(target, request)
            return self._next_attempt(error, target)
        return self._next_attempt(error, self.step.target)

    def _next_attempt(self, error: OutriderError, target: str) -> Step:
        """Returns the next attempt according to the retry policy. Raises: `error` if the policy gives up."""
        seconds = self._attempts.next_after(error)
        if seconds is None:
            raise error
        self._record.discard_started()  # the next attempt starts from scratch
        return Step(target, self._resume() if self._request is None else self._request, seconds)
