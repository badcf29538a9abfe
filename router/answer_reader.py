"""Who reads an answer, and how the new tokens of many answers are delivered together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outrider.answer import AnswerEvent, Started, Summary
from outrider.errors import RESUMED_ELSEWHERE, AbortedError, OutriderError
from router.sample_answer import SampleAnswer

BEHIND_SECONDS = 0.02
"""When news is told so late, the event loop has more to do than it can."""
MAX_MERGE_SECONDS = 0.1
MAX_ENTRIES = 2048
"""Of tokens and logprobs that are made into messages at once: some milliseconds of the event loop."""

Message = TypeVar("Message")


class ReadableAnswer(Protocol):
    """What a reader looks at (`router.answer.Answer`)."""

    samples: tuple[SampleAnswer, ...]
    started: Started | None
    summary: Summary | None
    failure: OutriderError | None
    entries_per_token: int
    """Itself, and its logprobs."""

    def leave(self, reader: AnswerReader[Any]) -> None: ...


class DeliveryBatcher:
    """Wakes all streams with new tokens in one callback, in the event loop's next turn.

    A session's message has tokens of many answers. Their clients' messages are made one after the
    other, without a system call in between, which would leave the caches cold.

    While the event loop is behind, streams are woken later still: what comes meanwhile is then in
    one delta. First tokens never wait.
    """

    def __init__(self) -> None:
        self._readers: list[AnswerReader[Any]] = []
        self._since = 0.0  # the loop's time at which the first of them was added

    def add(self, reader: AnswerReader[Any]) -> None:
        """Once for each reader until it is delivered to."""
        if not self._readers:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            loop.call_soon(self._deliver)
        self._readers.append(reader)

    def _deliver(self) -> None:
        readers, self._readers = self._readers, []
        loop = asyncio.get_running_loop()
        late = loop.time() - self._since
        if late > BEHIND_SECONDS:
            merged = [reader for reader in readers if reader.has_sent_tokens]
            loop.call_later(min(late, MAX_MERGE_SECONDS), _deliver_all, merged)
            readers = [reader for reader in readers if not reader.has_sent_tokens]
        _deliver_all(readers)


def _deliver_all(readers: Sequence[AnswerReader[Any]]) -> None:
    for reader in readers:
        reader.deliver()


@dataclass(slots=True)
class _Cursor:
    """What a reader has been told of one sample."""

    sample: SampleAnswer
    position: int  # the next one
    has_end: bool = False


class AnswerReader(Generic[Message]):
    """One client's stream of an answer, rendered to messages. Slow clients get fewer, larger deltas; no node waits."""

    def __init__(
        self,
        answer: ReadableAnswer,
        positions: Sequence[int],
        render: Callable[[AnswerEvent], Message],
        batcher: DeliveryBatcher,
    ) -> None:
        """`positions`: by sample, of the first token to tell."""
        self._answer = answer
        self._cursors = [_Cursor(sample, position) for sample, position in zip(answer.samples, positions, strict=True)]
        self._render = render
        self._batcher = batcher
        self._max_tokens = max(MAX_ENTRIES // answer.entries_per_token, 1)
        self._waiter: asyncio.Future[list[Message]] | None = None  # while the stream waits
        self._has_news = True
        self._is_superseded = False
        self._has_started = False
        self._has_sent_summary = False
        self.has_sent_tokens = False

    async def next(self) -> list[Message]:
        """Everything new, as soon as there is something: Started first, the Summary last. Nothing after that.

        Raises: the answer's failure, after what came before it; AbortedError when another
        reader has been attached.
        """
        messages: list[Message] = []
        while not messages:
            if self._has_news:
                messages = self._take_new()
            elif self._is_over():
                break
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                messages = await self._waiter
        if self._is_superseded:
            raise AbortedError("another stream of this answer was attached", reason=RESUMED_ELSEWHERE)
        if not messages and self._answer.failure is not None:
            raise self._answer.failure
        return messages

    def close(self) -> None:
        """The stream is over."""
        self._answer.leave(self)

    def supersede(self) -> None:
        """Another reader has been attached."""
        self._is_superseded = True
        self.wake()

    def wake(self) -> None:
        """There is news."""
        if not self._has_news:
            self._has_news = True
            if self._waiter is not None:
                self._batcher.add(self)

    def deliver(self) -> None:
        """Gives the stream that waits what is new."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():  # it is being cancelled
            return
        try:
            waiter.set_result(self._take_new())
        except Exception as error:  # noqa: BLE001 it is this stream's; others are told after it
            waiter.set_exception(error)

    def _is_over(self) -> bool:
        return self._is_superseded or self._has_sent_summary or self._answer.failure is not None

    def _take_new(self) -> list[Message]:
        """One delta for each sample with something new, each sample's end after its last.

        What is too much for one turn of the event loop stays for the next call.
        """
        answer, render = self._answer, self._render
        messages: list[Message] = []
        self._has_news = False
        if not self._has_started:
            if answer.started is None:
                return messages
            self._has_started = True
            messages.append(render(answer.started))
        num_left = self._max_tokens
        for cursor in self._cursors:
            sample = cursor.sample
            if cursor.position < sample.next_position:
                end = min(sample.next_position, cursor.position + num_left)
                messages.append(render(sample.delta(cursor.position, end)))
                num_left -= end - cursor.position
                cursor.position = end
                self.has_sent_tokens = True
                if not num_left:
                    self._has_news = True
                    return messages
            if sample.finished is not None and not cursor.has_end:
                cursor.has_end = True
                if cursor.position == sample.next_position and (tail := sample.tail()) is not None:
                    messages.append(render(tail))
                messages.append(render(sample.finished))
        if answer.summary is not None and not self._has_sent_summary:
            self._has_sent_summary = True
            messages.append(render(answer.summary))
        return messages
