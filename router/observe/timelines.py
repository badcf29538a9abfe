"""The newest requests' timelines, for the router's page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import OutriderError
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from router.observe.timeline import Timeline
from router.observe.trace_spans import end_trace

MAX_STEPS = 100_000
"""Steps kept of all requests together, about 20 MB."""


class Timelines:
    """The newest requests' timelines. Owned by the event loop.

    Of more than `max_timelines` requests, or `max_steps` steps together, those that ended first are forgotten first.
    A request that is forgotten while it runs records no more steps.
    """

    def __init__(
        self,
        max_timelines: int,
        *,
        keeps_tokens: bool = False,
        max_steps: int = MAX_STEPS,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`max_timelines`: 0 keeps none. `keeps_tokens`: the ids of tokens too, which are the answer's text."""
        self._max_timelines = max_timelines
        self._num_free_steps = max_steps if max_timelines else 0
        self.keeps_tokens = keeps_tokens
        self._tracer = tracer
        self._serials = itertools.count(1)
        self._running: dict[int, Timeline] = {}  # by serial, in the order of their beginning
        self._ended: dict[int, Timeline] = {}  # by serial, in the order of their end

    def __iter__(self) -> Iterator[Timeline]:
        """The newest first."""
        return iter(sorted((*self._running.values(), *self._ended.values()), key=lambda each: -each.serial))

    def find(self, serial: int) -> Timeline | None:
        return self._running.get(serial) or self._ended.get(serial)

    def begin(self, request_id: str) -> Timeline:
        """Begins the timeline of a request that has just arrived. The caller ends it with `end`."""
        timeline = Timeline(
            next(self._serials),
            request_id,
            self._take_room,
            keeps_tokens=self.keeps_tokens,
            tracer=self._tracer,
            traced=self._tracer.begin("generate"),
        )
        self._running[timeline.serial] = timeline
        while len(self._running) + len(self._ended) > self._max_timelines:
            self._forget(self._ended or self._running)
        return timeline

    @contextmanager
    def beginning(self, request_id: str) -> Iterator[Timeline]:
        """As `begin`; what the block raises ends it."""
        timeline = self.begin(request_id)
        try:
            yield timeline
        except OutriderError as error:
            self.end(timeline, error)
            raise
        except BaseException:
            self.end(timeline, None)
            raise

    def end(self, timeline: Timeline, error: OutriderError | None) -> None:
        """Ends the timeline, whether the request was answered, aborted or failed. Idempotent."""
        timeline.end(error)
        if timeline.traced.is_recording():
            end_trace(timeline, error="" if error is None else error.reason)
        if self._running.pop(timeline.serial, None) is not None:
            self._ended[timeline.serial] = timeline

    def _take_room(self, size: int) -> bool:
        while self._num_free_steps < size and self._ended:
            self._forget(self._ended)
        if self._num_free_steps < size:
            return False
        self._num_free_steps -= size
        return True

    def _forget(self, timelines: dict[int, Timeline]) -> None:
        """Removes the oldest of these timelines and frees its steps, even while a caller still holds the timeline."""
        timeline = timelines.pop(next(iter(timelines)))
        timeline.take_room = lambda _size: False
        self._num_free_steps += timeline.size
        timeline.steps, timeline.size = [], 0
