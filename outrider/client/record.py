"""What a Generate stream has told so far."""

from __future__ import annotations

from outrider.answer import Delta, Finished, Started, Summary
from outrider.client.retry import Attempts
from outrider.errors import InternalError, OutriderError, PeerLostError
from outrider.v1 import router_pb2
from outrider.wire.answer import event_from_proto


class StreamRecord:
    """Sorts a stream's events. The base of both clients' streams."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        """The request's name on its router from the first moment, for `abort` and for logs."""
        self._started: Started | None = None
        self._summary: Summary | None = None
        self._text: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        """By sample, as they end."""

    def take(self, event: router_pb2.GenerateResponse) -> Delta | None:
        """The event's Delta; other events are only recorded."""
        value = event_from_proto(event)
        match value:
            case Started():
                self._started = value
            case Delta():
                self._text.setdefault(value.sample, []).append(value.text)
                self._token_ids.setdefault(value.sample, []).extend(value.token_ids)
                return value
            case Finished():
                self.finished[value.sample] = value
            case Summary():
                self._summary = value
        return None

    def next_attempt_after(self, error: OutriderError, attempts: Attempts) -> float | None:
        """How long to wait before the request is sent again; None: the error stands.

        What has begun to arrive is not begun again: the error's notes then say how to go on.
        """
        if self.has_deltas:
            if isinstance(error, PeerLostError):
                num_tokens = sum(map(len, self._token_ids.values()))
                error.add_note(
                    f"{num_tokens} tokens had arrived, and this version has no Resume: to go on, send the request "
                    "again with this seed and generated_token_ids"
                )
            return None
        seconds = attempts.next_after(error)
        if seconds is not None:
            self._started = None  # of the next attempt nothing is known yet
        return seconds

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
        """There from the first Delta on. Raises: InternalError before."""
        if self._started is None:
            raise InternalError("the stream has not started yet")
        return self._started

    @property
    def summary(self) -> Summary:
        """There when the stream has ended by itself. Raises: InternalError before."""
        if self._summary is None:
            raise InternalError("the stream has not ended yet, or was cancelled")
        return self._summary

    def text(self, sample: int = 0) -> str:
        """Everything of one sample so far."""
        return "".join(self._text.get(sample, ()))

    def token_ids(self, sample: int = 0) -> tuple[int, ...]:
        """Everything of one sample so far."""
        return tuple(self._token_ids.get(sample, ()))
