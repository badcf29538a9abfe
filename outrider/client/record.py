"""What a Generate stream has told so far."""

from __future__ import annotations

from outrider.answer import Delta, Finished
from outrider.client.messages import read_delta, read_finished, read_started, read_summary
from outrider.client.values import Started, Summary
from outrider.errors import InternalError
from outrider.v1 import router_pb2


class StreamRecord:
    """Sorts a stream's events. The base of both clients' streams."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._summary: Summary | None = None
        self._text: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        """By sample, as they end."""

    def take(self, event: router_pb2.GenerateResponse) -> Delta | None:
        """The event's Delta; other events are only recorded."""
        match event.WhichOneof("event"):
            case "started":
                self._started = read_started(event.started, event.request_id)
            case "delta":
                delta = read_delta(event.delta)
                self._text.setdefault(delta.sample, []).append(delta.text)
                self._token_ids.setdefault(delta.sample, []).extend(delta.token_ids)
                return delta
            case "finished":
                finished = read_finished(event.finished)
                self.finished[finished.sample] = finished
            case "summary":
                self._summary = read_summary(event.summary, event.request_id)
        return None

    @property
    def has_started(self) -> bool:
        return self._started is not None

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
