"""The request of a Generate stream, and what has arrived of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from outrider.answer import Delta, Finished, Started, Summary
from outrider.errors import InternalError, MismatchError
from outrider.v1 import router_pb2
from outrider.wire.answer import event_from_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for an answer, or for the rest of an answer whose request id is known."""

    request_id: str
    request: router_pb2.GenerateRequest | None  # None: only the id is known
    resume_window_seconds: float | None  # None: the request cannot be resumed
    next_positions: Mapping[int, int] = field(default_factory=dict)  # by sample, as in Resume

    @classmethod
    def answer_to(cls, request: router_pb2.GenerateRequest) -> Self:
        """Returns a StreamRequest for a `request` that has an id."""
        window = request.resume_window
        return cls(
            request_id=request.request_id,
            request=request,
            resume_window_seconds=window.ToNanoseconds() / 1e9 if request.HasField("resume_window") else None,
        )


class StreamRecord:
    """Records the events of a stream. It is the base class of both clients' streams."""

    def __init__(self, wanted: StreamRequest) -> None:
        self.request_id = wanted.request_id
        """The request's id on its router, for `abort` and for logs."""
        self.num_events = 0
        self._num_brought_tokens = 0 if wanted.request is None else len(wanted.request.generated_token_ids)
        self.is_resent = False  # whether the request was sent again with the tokens that had arrived
        self._started: Started | None = None
        self._summary: Summary | None = None
        self._text: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._next_positions = dict(wanted.next_positions)
        self._ended_texts: set[int] = set()  # samples whose final text, in a Delta without tokens, has arrived
        self.finished: dict[int, Finished] = {}
        """The finished samples, by index."""

    def take(self, event: router_pb2.GenerateResponse) -> Delta | None:
        """Records an event, and returns its Delta, or None for other events.

        Raises: InternalError for a Delta that leaves a gap or repeats a token, and for the Started
        event of another request; MismatchError if another adapter continues the answer.
        """
        self.num_events += 1
        value = event_from_proto(event)
        match value:
            case Started():
                self._take_started(value)
            case Delta():
                return self._take_delta(value)
            case Finished():
                self.finished[value.sample] = value
            case Summary():
                if self.is_resent:  # the last call generated only a part of the tokens
                    value = replace(value, usage=replace(value.usage, num_generated_tokens=self.num_tokens))
                self._summary = value
        return None

    def _take_started(self, started: Started) -> None:
        before = self._started
        if before is not None and (before.seed, before.num_prompt_tokens) != (started.seed, started.num_prompt_tokens):
            raise InternalError(f"{started.router} resumed another request instead of {self.request_id!r}")
        if before is not None and before.adapter_fingerprint != started.adapter_fingerprint:
            was, now = (each.adapter_fingerprint or "no adapter" for each in (before, started))
            message = f"request {self.request_id!r} began with {was}, but {started.router} continues it with {now}"
            raise MismatchError(message, reason="ADAPTER_MISMATCH")
        if before is not None and not started.prompt_logprobs:  # the resumed call did not ask for these again
            started = replace(started, prompt_logprobs=before.prompt_logprobs)
        self._started = started

    def _take_delta(self, delta: Delta) -> Delta | None:
        """Returns the Delta, or None if a resumed call repeats a Delta of text only.

        Positions do not reveal such a repeat, since they count only tokens.
        """
        sample = delta.sample
        expected = self._next_positions.get(sample, delta.start_position)
        if delta.start_position != expected:
            raise InternalError(f"sample {sample} continued at position {delta.start_position} instead of {expected}")
        if not delta.token_ids:
            if sample in self._ended_texts:
                return None
            self._ended_texts.add(sample)
        self._next_positions[sample] = expected + len(delta.token_ids)
        self._text.setdefault(sample, []).append(delta.text)
        self._token_ids.setdefault(sample, []).extend(delta.token_ids)
        return delta

    def next_positions(self) -> dict[int, int]:
        """Returns the next position of each sample, as Resume takes them. A missing sample starts after the prompt."""
        if self._num_brought_tokens and self._started is not None:
            first = self._started.num_prompt_tokens + self._num_brought_tokens
            return {0: first, **self._next_positions}
        return dict(self._next_positions)

    def discard_started(self) -> None:
        """Forgets the Started event, since a new attempt may draw another seed."""
        self._started = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples so far."""
        return sum(map(len, self._token_ids.values()))

    @property
    def has_started(self) -> bool:
        return self._started is not None

    @property
    def has_deltas(self) -> bool:
        """Whether a part of the answer has arrived."""
        return bool(self._token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the summary has arrived."""
        return self._summary is not None

    @property
    def started(self) -> Started:
        """The Started event, which arrives before the first Delta. Raises: InternalError if it has not arrived."""
        if self._started is None:
            raise InternalError("the stream has not started yet")
        return self._started

    @property
    def summary(self) -> Summary:
        """The summary, which ends a complete answer. Raises: InternalError if it has not arrived."""
        if self._summary is None:
            raise InternalError("the stream has not ended yet, or was cancelled")
        return self._summary

    def text(self, sample: int = 0) -> str:
        """Returns the text of one sample so far."""
        return "".join(self._text.get(sample, ()))

    def token_ids(self, sample: int = 0) -> tuple[int, ...]:
        """Returns the tokens of one sample so far."""
        return tuple(self._token_ids.get(sample, ()))
