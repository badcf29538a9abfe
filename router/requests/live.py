"""A request as clients, the registry and the store see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from outrider.answer import AnswerEvent
from outrider.errors import OutriderError
from router.observe.records import Trailers, make_trailers
from router.requests import events as on
from router.requests.answer import Answer
from router.requests.answer_budget import Unread
from router.requests.driver import Driver, EncodedRequest, RouterContext
from router.requests.states import State

Message = TypeVar("Message")


class LiveRequest:
    """A request and its answer. Owned by the event loop.

    The answer outlives its streams by the resume window; without a window it ends with its only stream.
    """

    def __init__(
        self,
        key: str,
        context: RouterContext,
        *,
        window_seconds: float | None,
        on_change: Callable[[LiveRequest], None],
    ) -> None:
        """Starts in the state ENCODING; `start` or `close` follows.

        `key`: the client's request id, preceded by the client's name if that is known. `window_seconds`: how long the
        answer can be resumed. `on_change` is called when a reader attaches, and when the key is free.
        """
        self.key = key
        self.window_seconds = window_seconds
        self.is_durable = True  # False: the request should be resumable on any router, but the store did not answer
        self._driver = Driver(key, context, window_seconds=window_seconds, on_free=lambda: on_change(self))
        self._feed = self._driver.feed
        self._request = self._driver.request
        self._clock = context.answers.clock
        self._on_change = on_change
        self._writer: asyncio.Task[object] | None = None  # the attached stream's
        self._given_up: OutriderError | None = None

    def start(self, encoded: EncodedRequest) -> None:
        """Starts serving the request."""
        encoded.account.give_up = self.give_up
        self._driver.begin(encoded)

    @property
    def answer(self) -> Answer:
        """The answer. The request must have started."""
        return self._driver.encoded.answer

    @property
    def state(self) -> State:
        return self._request.state

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def is_idle(self) -> bool:
        """Whether the work has ended and there is no reader, so that the answer only waits for its client to return."""
        return self.is_closed or (self.state is State.ENDED and not self._request.has_reader)

    def trailers(self) -> Trailers:
        """Returns the trailers of a call, for the answer so far."""
        return make_trailers(self._driver.encoded.record, is_durable=self.is_durable)

    def abort(self) -> bool:
        """Ends the unfinished samples. Returns whether there were any to stop."""
        was_running = self.state in {State.QUEUED, State.SERVING}
        self._feed(on.AbortRequested())
        return was_running

    def fail(self, error: OutriderError) -> None:
        """Ends the request with this error, unless its samples have ended."""
        self._feed(on.Failed(error))

    def close(self, error: OutriderError | None = None) -> None:
        """Drops the answer and frees the key. Idempotent.

        `error`: the error with which an unfinished answer ends; None: the client has left.
        """
        self._feed(on.Dropped(error))

    def give_up(self, error: OutriderError) -> None:
        """Drops the answer and ends the attached stream, even if its client does not read."""
        if self._writer is not None:
            self._given_up = error
            self._writer.cancel()
        self.close(error)

    def leave(self) -> None:
        """Records the end of a call that may have read the answer. If no reader is left, the resume window begins."""
        self._feed(on.ReaderLeft())

    async def write(
        self,
        write: Callable[[Message], Awaitable[None]],
        render: Callable[[AnswerEvent], Message],
        next_positions: Mapping[int, int] | None = None,
    ) -> None:
        """Writes the answer from these positions (by sample), message by message, as fast as the client takes them.

        A previously attached stream ends. The caller calls `leave` afterwards. Raises: OutOfRangeError for positions
        that the answer does not have; the answer's failure; AbortedError if another stream is attached, or if the
        answer has been dropped; the error passed to `give_up`.
        """
        reader = self.answer.read(render, next_positions)
        account, clock = self._driver.encoded.account, self._clock
        account.unread = None
        self._feed(on.ReaderAttached())
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
            writer.uncancel()  # the cancellation came from `give_up`
            raise self._given_up from None
        except OutriderError as error:  # for example the answer's failure, or an answer too large for a message
            if self.window_seconds is None:
                self.close(error)
            raise
        finally:
            self.answer.leave(reader)
            if self._writer is writer:
                self._writer = None
