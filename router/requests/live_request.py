"""A request by its name: its answer, the task that computes it, and the client's stream of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from outrider.answer import AnswerEvent
from outrider.errors import AbortedError, InternalError, OutriderError
from outrider.service.telemetry.logging import get_logger
from outrider.v1 import router_pb2
from router.observe.request_figures import Trailers
from router.requests.answer_budget import Unread
from router.requests.request_flow import RequestFlow
from router.requests.work import Work

_log = get_logger("requests")
Message = TypeVar("Message")


class LiveRequest:
    """Owned by the event loop.

    The answer outlives its streams by the resume window; without one it ends with its only stream.
    """

    def __init__(
        self,
        key: str,
        work: Work,
        flow: RequestFlow,
        proto: router_pb2.GenerateRequest,
        *,
        window_seconds: float | None,
        on_change: Callable[[LiveRequest], None],
    ) -> None:
        """Starts to compute. The account is closed with the request.

        `window_seconds`: how long the answer can be resumed; None: it ends with its stream. `on_change` is called
        when it has a reader again, and when it is closed.
        """
        self.key = key  # the client's name for it, behind the client's own where clients have one
        self.answer = work.answer
        self.window_seconds = window_seconds
        self.is_closed = False
        self.is_kept = True  # False: asked to be resumable anywhere, and the store did not answer
        self._work = work
        self._flow = flow
        self._budget, self._account = work.services.answers, work.account
        self._account.give_up = self.give_up
        self._on_change = on_change
        self._expiry: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[object] | None = None  # of the stream that is attached
        self._given_up: OutriderError | None = None
        self._task = asyncio.create_task(flow.run(proto), name=f"request {key}")
        self._task.add_done_callback(self._take_end)

    @property
    def is_idle(self) -> bool:
        """Nothing is computed and nobody reads: the answer only waits for its client to come back."""
        return self.is_closed or (self.answer.has_ended and not self.answer.has_reader)

    def trailers(self) -> Trailers:
        """What a call's trailers say of the answer so far."""
        return self._work.figures.trailers(num_generated_tokens=self.answer.num_generated_tokens, is_kept=self.is_kept)

    def abort(self) -> bool:
        """Whether there was something to stop."""
        return self._flow.abort()

    def fail(self, error: OutriderError) -> None:
        """The request ends with this error, unless it has ended."""
        self._flow.fail(error)

    async def write(
        self,
        write: Callable[[Message], Awaitable[None]],
        render: Callable[[AnswerEvent], Message],
        next_positions: Mapping[int, int] | None = None,
    ) -> None:
        """Passes the answer on from these positions (by sample), message by message, as the client takes them.

        The stream that was attached before ends. Raises: OutOfRangeError for positions that the answer does not
        have; what the answer ends with; AbortedError when another stream is attached, or when the answer has been
        dropped; what `give_up` says.
        """
        if self.is_closed:
            self.answer.fail(_dropped())  # nobody computes it any more; one that has ended can still be read
        reader = self.answer.read(render, next_positions)
        self._stop_expiry()
        account, clock = self._account, self._budget.clock
        account.unread = None
        self._on_change(self)
        writer = self._writer = asyncio.current_task()
        try:
            while messages := await reader.next():
                for message in messages:
                    account.unread = Unread.STALLED, clock()
                    await write(message)
                    account.unread = None
            if self._writer is writer:
                account.unread = Unread.DELIVERED, clock()
        except asyncio.CancelledError:
            if self._given_up is None or writer is None:
                raise
            writer.uncancel()  # it was us
            raise self._given_up from None
        except OutriderError as error:  # its own, or such as an answer that is too large for a message
            if self.window_seconds is None:
                self.close(error)
            raise
        finally:
            self.answer.leave(reader)
            if self._writer is writer:
                self._writer = None
            self.leave()

    def give_up(self, error: OutriderError) -> None:
        """Ends the answer, and the stream that its client does not read, and drops it."""
        if self._writer is not None:
            self._given_up = error
            self._writer.cancel()
        self.close(error)

    def close(self, error: OutriderError | None = None) -> None:
        """Drops the answer and frees the name; what still computes is stopped. Idempotent.

        `error`: what an answer that has not ended ends with. None: its client has left, or its window is over.
        """
        if self.is_closed:
            return
        if error is not None:
            self.answer.fail(error)
        self.is_closed = True
        self._stop_expiry()
        self._budget.close(self._account)
        if not self._task.done():
            if error is None:
                _log.info("client left", request_id=self.key)
            self._task.cancel()
        if self.answer.has_reader:
            self.answer.fail(_dropped())  # its reader waits for no more
        self._on_change(self)

    def leave(self) -> None:
        """A call that could read the answer is over. Unless another one reads, the resume window begins.

        There is nothing to come back to where the request was refused before it began: its name is free.
        """
        if self.answer.has_reader or self.is_closed or self._expiry is not None:
            return
        was_refused = self.answer.failure is not None and self.answer.started is None
        if self.window_seconds is None or was_refused:
            self.close()
        else:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self.window_seconds, self.close)
            if self._account.unread is None or self._account.unread[0] is not Unread.DELIVERED:
                self._account.unread = Unread.LEFT, self._budget.clock()

    def _take_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request's flow failed", request_id=self.key, exc_info=error)
            self.answer.fail(InternalError(f"the request's flow failed: {error}"))
        answer, work = self.answer, self._work
        num_tokens = None if answer.summary is None else answer.num_generated_tokens / len(answer.samples)
        self._budget.settle(self._account, num_tokens)
        work.figures.close(answer.failure)
        work.services.timelines.end(work.figures.timeline, answer.failure)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def _dropped() -> AbortedError:
    return AbortedError("the answer was dropped", reason="DROPPED")
