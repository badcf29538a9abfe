"""Requests by their client's name for them: while they run, and as long as their answers are resumable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from outrider.answer import AnswerEvent
from outrider.errors import AbortedError, AlreadyRunningError, InternalError, NotFoundError, OutriderError
from outrider.service.telemetry.logging import get_logger
from router.answer import Answer
from router.request_flow import RequestFlow
from router.trailers import NOTHING_GENERATED, Trailers

_log = get_logger("requests")
Message = TypeVar("Message")


class RunningRequest:
    """One name in use: an answer, the task that computes it, and the client's stream of it.

    The answer outlives its streams by the resume window; without one it ends with its only
    stream. Stopping works from the first moment, before there is a flow to stop.
    """

    def __init__(self, key: str, on_change: Callable[[RunningRequest], None]) -> None:
        self.key = key  # the client's name for it, behind the client's own where clients have one
        self._on_change = on_change
        self._answer: Answer | None = None
        self._flow: RequestFlow | None = None
        self._trailers: Callable[[], Trailers] = lambda: NOTHING_GENERATED
        self._releases: list[Callable[[], None]] = []
        self._resume_window_seconds: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_aborted = False
        self._error: OutriderError | None = None
        self._writer: asyncio.Task[object] | None = None  # of the stream that is attached
        self._given_up: OutriderError | None = None
        self.stalled_since: float | None = None  # monotonic seconds: the client has left a message untaken since then
        self.is_closed = False
        self.is_kept = True  # False: asked to be resumable anywhere, and the store did not answer

    @property
    def answer(self) -> Answer:
        assert self._answer is not None, "begin comes first"
        return self._answer

    @property
    def is_idle(self) -> bool:
        """Nothing is computed and nobody reads: the answer only waits for its client to come back."""
        return self.is_closed or (self._answer is not None and self._answer.has_ended and not self._answer.has_reader)

    @property
    def is_resumable(self) -> bool:
        return self._resume_window_seconds is not None and self._answer is not None

    def begin(
        self,
        answer: Answer,
        flow: RequestFlow,
        *,
        trailers: Callable[[], Trailers],
        resume_window_seconds: float | None,
    ) -> None:
        """Starts to compute."""
        self._answer, self._flow, self._trailers = answer, flow, trailers
        self._resume_window_seconds = resume_window_seconds
        if self._is_aborted:
            flow.abort()
        elif self._error is not None:
            flow.fail(self._error)
        self._task = asyncio.create_task(flow.run(), name=f"request {self.key}")
        self._task.add_done_callback(self._take_end)

    def on_close(self, release: Callable[[], None]) -> None:
        """`release` is called when the answer is dropped, also where there was none yet."""
        self._releases.append(release)

    def trailers(self) -> Trailers:
        """What a call's trailers say of the answer so far."""
        return self._trailers()

    def abort(self) -> bool:
        """Whether there was something to stop."""
        if self._flow is not None:
            return self._flow.abort()
        was_aborted, self._is_aborted = self._is_aborted, True
        return not was_aborted

    def fail(self, error: OutriderError) -> None:
        """The request ends with this error, unless it has ended."""
        self._error = error
        if self._flow is not None:
            self._flow.fail(error)

    async def write(
        self,
        write: Callable[[Message], Awaitable[None]],
        render: Callable[[AnswerEvent], Message],
        next_positions: Mapping[int, int] | None = None,
    ) -> None:
        """Passes the answer on from these positions (by sample), message by message, as the client takes them.

        The stream that was attached before ends. Raises: OutOfRangeError for positions that the answer does not
        have; what the answer ends with; AbortedError when another stream is attached; what `give_up` says.
        """
        reader = self.answer.read(render, next_positions)
        self._stop_expiry()
        writer = self._writer = asyncio.current_task()
        try:
            while messages := await reader.next():
                for message in messages:
                    self.stalled_since = time.monotonic()
                    await write(message)
                    self.stalled_since = None
        except asyncio.CancelledError:
            if self._given_up is None or writer is None:
                raise
            writer.uncancel()  # it was us
            raise self._given_up from None
        finally:
            reader.close()
            if self._writer is writer:
                self._writer = self.stalled_since = None
            self.leave()

    def give_up(self, error: OutriderError) -> None:
        """Ends the answer, and the stream that its client does not read, and drops it."""
        self.fail(error)
        if self._writer is not None:
            self._given_up = error
            self._writer.cancel()
        self.close()

    def close(self) -> None:
        """Drops the answer and frees the name; what still computes is stopped. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._stop_expiry()
        if self._task is not None and not self._task.done():
            _log.info("client left", request_id=self.key)
            self._task.cancel()
        if self._answer is not None and self._answer.has_reader:
            self._answer.fail(AbortedError("the answer was dropped", reason="DROPPED"))  # its reader waits for no more
        for release in self._releases:
            release()
        self._on_change(self)

    def leave(self) -> None:
        """A call that could read the answer is over. Unless another one reads, the resume window begins."""
        if self._answer is None or self._answer.has_reader or self.is_closed or self._expiry is not None:
            return
        if self._resume_window_seconds is None:
            self.close()
        else:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._resume_window_seconds, self.close)
            self._on_change(self)

    def _take_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request's flow failed", request_id=self.key, exc_info=error)
            self.answer.fail(InternalError(f"the request's flow failed: {error}"))
        self._on_change(self)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class RunningRequests:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningRequest] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        """Names in use: resumable answers that have ended count."""
        return len(self._by_id)

    def enter(self, request_id: str) -> RunningRequest:
        """Takes the name until the request is closed. Raises: AlreadyRunningError."""
        if request_id in self._by_id:
            raise AlreadyRunningError(f"request {request_id!r} is running", reason="DUPLICATE_REQUEST_ID")
        running = self._by_id[request_id] = RunningRequest(request_id, self._take_change)
        self._is_idle.clear()
        return running

    def has(self, request_id: str) -> bool:
        return request_id in self._by_id

    def find_resumable(self, request_id: str) -> RunningRequest:
        """Raises: NotFoundError for a name that is not in use, or whose answer cannot be resumed."""
        running = self._by_id.get(request_id)
        if running is None:
            raise NotFoundError(f"no request {request_id!r} is running or resumable here", reason="REQUEST_NOT_FOUND")
        if not running.is_resumable:
            raise NotFoundError(f"request {request_id!r} has no resume window", reason="NOT_RESUMABLE")
        return running

    def abort(self, request_id: str) -> bool:
        """False: unknown, or it has ended already."""
        running = self._by_id.get(request_id)
        return running is not None and running.abort()

    def fail_all(self, error: OutriderError) -> None:
        """Every request that runs ends with this error."""
        for running in self._by_id.values():
            running.fail(error)

    def close_all(self) -> None:
        """Drops every answer."""
        for running in tuple(self._by_id.values()):
            running.close()

    async def wait_until_idle(self) -> None:
        """Until nothing is computed and no stream is attached."""
        await self._is_idle.wait()

    def _take_change(self, running: RunningRequest) -> None:
        if running.is_closed:
            self._by_id.pop(running.key, None)
        if all(other.is_idle for other in self._by_id.values()):
            self._is_idle.set()
        else:
            self._is_idle.clear()
