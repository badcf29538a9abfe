"""An answer: all tokens with their positions and text, and its readers. It knows nothing about nodes.

Tokens are recorded before they are delivered. A later attempt continues from the record, a client that
reconnects gets the record replayed, and tokens of two concurrent attempts are compared with the record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from outrider.answer import AnswerEvent, Started, Summary
from outrider.errors import RESUMED_ELSEWHERE, AbortedError, InternalError, OutOfRangeError, OutriderError
from outrider.request import FinishReason, Request, TokenLogprobs
from outrider.session import SampleDone, SampleStart, SampleTokens
from outrider.wire.answer import PackedLogprobs, pack_logprobs
from router.requests.sample_answer import SampleAnswer
from router.text.answer_text import AnswerText, ByteDetokenizer, Detokenizer
from router.text.tokenizer import Tokenizer

OVERLOADED_SECONDS = 0.02
"""Delivery delay in seconds above which the event loop counts as overloaded."""
MAX_MERGE_SECONDS = 0.1
MAX_ENTRIES = 2048
"""Maximum tokens and logprobs rendered to messages at once, which takes a few milliseconds of the event loop."""

Message = TypeVar("Message")


class Answer:
    """All samples of one request. Owned by the event loop.

    The record ends with a summary or a failure; until then the reader waits for more. At most one
    reader is attached: attaching another one ends the stream of the first.
    """

    def __init__(self, request: Request, started: Started, *, tokenizer: Tokenizer, batcher: DeliveryBatcher) -> None:
        """`started`: readers' first message, sent once the request is admitted and no prompt logprobs are missing."""
        self.request = request
        self._started = started
        self.needs_prompt_logprobs = False
        if request.options.prompt_logprobs is not None:
            self._first_logprobs = pack_logprobs([TokenLogprobs(request.prompt_token_ids[0], math.nan, 0)])
            self._started = replace(started, prompt_logprobs=PackedLogprobs(self._first_logprobs))
            self.needs_prompt_logprobs = len(request.prompt_token_ids) > 1
        self._batcher = batcher
        token_bytes = tokenizer.token_bytes if request.output.token_bytes else None
        self.samples = tuple(
            SampleAnswer(sample=sample, request=request, text=_make_text(request, tokenizer), token_bytes=token_bytes)
            for sample in range(request.options.sampling.n)
        )
        self.started: Started | None = None
        self.summary: Summary | None = None
        self.failure: OutriderError | None = None
        self.may_lag_client = False  # whether another router may have delivered tokens that it did not store
        logprobs = request.options.logprobs
        self.entries_per_token = 1 if logprobs is None else 2 + logprobs.num_top  # the token and its logprobs
        self._reader: AnswerReader[Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every sample has ended and no prompt logprobs are missing."""
        return not self.needs_prompt_logprobs and all(sample.finished is not None for sample in self.samples)

    @property
    def has_ended(self) -> bool:
        """Whether the answer has its summary or a failure, so that nothing more will come."""
        return self.summary is not None or self.failure is not None

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    @property
    def num_generated_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    def unfinished_samples(self) -> tuple[SampleStart, ...]:
        """Returns the samples that an attempt has to compute, with their tokens so far."""
        return tuple(
            SampleStart(sample=index, generated_token_ids=sample.generated_token_ids)
            for index, sample in enumerate(self.samples)
            if sample.finished is None
        )

    # ------------------------------------------------------------ writing

    def begin(self) -> None:
        """Records that the request is admitted, unless prompt logprobs are still missing. Idempotent."""
        if self.started is None and not self.needs_prompt_logprobs:
            self.started = self._started
            self._notify_reader()

    def take_prompt_logprobs(self, packed: bytes) -> None:
        """Takes the packed logprobs of all prompt tokens except the first, and calls `begin`. Idempotent."""
        if self.needs_prompt_logprobs:
            self.needs_prompt_logprobs = False
            self._started = replace(self._started, prompt_logprobs=PackedLogprobs(self._first_logprobs + packed))
            self.begin()

    def take(self, tokens: SampleTokens) -> tuple[int, bool]:
        """Takes a sample's tokens. Returns (number of new tokens, whether they ended the sample).

        Raises: TokenMismatchError, InternalError.
        """
        sample = self._sample(tokens.sample)
        was_finished = sample.finished is not None
        num_new = sample.take(tokens)
        if num_new:
            self._notify_reader()
        return num_new, not was_finished and sample.finished is not None

    def finish(self, done: SampleDone) -> None:
        """Ends a sample, because a node reports its end. Raises: InternalError if the report is not valid."""
        if done.reason is FinishReason.ABORTED:
            raise InternalError("it aborted a sample, which only the router may do")
        self._sample(done.sample).finish(done.reason, stop_token_id=done.stop_token_id)
        self._notify_reader()

    def abort(self) -> None:
        """Ends every unfinished sample as aborted. Missing prompt logprobs will not be delivered."""
        if self.needs_prompt_logprobs:
            self.needs_prompt_logprobs = False
            self._started = replace(self._started, prompt_logprobs=())
        for sample in self.samples:
            sample.finish(FinishReason.ABORTED)
        self._notify_reader()

    def close(self, summary: Summary) -> None:
        assert self.is_complete, "a summary follows the last sample's end"
        self.summary = summary
        self._notify_reader()

    def fail(self, error: OutriderError) -> None:
        """Ends the answer with an error, unless it has ended. Samples that have ended stay as they are."""
        if not self.has_ended:
            self.failure = error
            self._notify_reader()

    # ------------------------------------------------------------ reading

    def read(
        self, render: Callable[[AnswerEvent], Message], next_positions: Mapping[int, int] | None = None
    ) -> AnswerReader[Message]:
        """Attaches a reader that receives everything from the given positions (by sample) onwards.

        The default position is that of the first token of this call. A previously attached reader ends with
        AbortedError. Raises: OutOfRangeError for positions that the answer does not have.
        """
        positions = [sample.start_position for sample in self.samples]
        for index, position in (next_positions or {}).items():
            if index >= len(self.samples):
                raise OutOfRangeError(f"there is no sample {index}: the answer has {len(self.samples)} samples")
            sample = self.samples[index]
            last = sample.last_position if self.may_lag_client and not sample.is_whole else sample.next_position
            if not sample.start_position <= position <= last:
                raise OutOfRangeError(
                    f"sample {index} has no position {position}, only {sample.start_position} to {last}"
                )
            positions[index] = position
        if self._reader is not None:
            self._reader.supersede()
        reader = AnswerReader(self, positions, render, self._batcher)
        self._reader = reader
        return reader

    def leave(self, reader: AnswerReader[Any]) -> None:
        """Detaches the reader, because its stream has ended."""
        if self._reader is reader:
            self._reader = None

    def _notify_reader(self) -> None:
        if self._reader is not None:
            self._reader.wake()

    def _sample(self, index: int) -> SampleAnswer:
        if index >= len(self.samples):
            raise InternalError(f"it named sample {index}, but the number of samples is {len(self.samples)}")
        return self.samples[index]


def _make_text(request: Request, tokenizer: Tokenizer) -> AnswerText:
    stop, output, sampling = request.stop, request.output, request.options.sampling
    detokenizer: Detokenizer = ByteDetokenizer(())
    if stop.strings or not output.token_ids_only:  # otherwise no text is needed
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=output.skip_special_tokens, context=request.prompt_token_ids
        )
    return AnswerText(detokenizer, stop.strings, include_match=stop.include_match, min_tokens=sampling.min_tokens)


class DeliveryBatcher:
    """Wakes all streams with new tokens in one callback, in the next iteration of the event loop.

    One message of a decode node has tokens of many answers. The messages to the answers' clients are rendered one
    after the other, because a system call between two of them would leave the CPU caches cold.

    While the event loop is overloaded, streams are woken later, so that tokens that arrive meanwhile share one
    delta. A stream's first tokens are never delayed.
    """

    def __init__(self) -> None:
        self._readers: list[AnswerReader[Any]] = []
        self._since = 0.0  # the loop's time when the first of these readers was added

    def add(self, reader: AnswerReader[Any]) -> None:
        """Queues a reader for delivery. The caller must not add it again before the delivery."""
        if not self._readers:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            loop.call_soon(self._deliver)
        self._readers.append(reader)

    def _deliver(self) -> None:
        readers, self._readers = self._readers, []
        loop = asyncio.get_running_loop()
        late = loop.time() - self._since
        if late > OVERLOADED_SECONDS:
            merged = [reader for reader in readers if reader.has_sent_tokens]
            loop.call_later(min(late, MAX_MERGE_SECONDS), _deliver_all, merged)
            readers = [reader for reader in readers if not reader.has_sent_tokens]
        _deliver_all(readers)


def _deliver_all(readers: Sequence[AnswerReader[Any]]) -> None:
    for reader in readers:
        reader.deliver()


class AnswerReader(Generic[Message]):
    """One client's stream of an answer, as messages. Slow clients get fewer, larger deltas; nodes never wait."""

    def __init__(
        self,
        answer: Answer,
        positions: Sequence[int],
        render: Callable[[AnswerEvent], Message],
        batcher: DeliveryBatcher,
    ) -> None:
        """`positions`: the first position to deliver, by sample."""
        self._answer = answer
        self._positions = list(positions)  # the next position to deliver, by sample
        self._ended: set[int] = set()  # samples whose end was delivered
        self._render = render
        self._batcher = batcher
        self._max_tokens = max(MAX_ENTRIES // answer.entries_per_token, 1)
        self._waiter: asyncio.Future[list[Message]] | None = None  # set while the stream waits
        self._has_unread = True
        self._is_superseded = False
        self._has_started = False
        self._has_sent_summary = False
        self.has_sent_tokens = False

    async def next(self) -> list[Message]:
        """Waits for new messages and returns all of them. Started is the first message, and the Summary the last.

        After the Summary, returns an empty list.

        Raises: the answer's failure, after all messages that precede it; AbortedError if another reader has been
        attached.
        """
        messages: list[Message] = []
        while not messages:
            if self._has_unread:
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

    def supersede(self) -> None:
        """Ends this stream because another reader has been attached."""
        self._is_superseded = True
        self.wake()

    def wake(self) -> None:
        """Records that there is something unread, and schedules its delivery if the stream waits."""
        if not self._has_unread:
            self._has_unread = True
            if self._waiter is not None:
                self._batcher.add(self)

    def deliver(self) -> None:
        """Delivers the new messages to the waiting stream, if there is one."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():  # no stream waits, or its task is being cancelled
            return
        try:
            waiter.set_result(self._take_new())
        except Exception as error:  # noqa: BLE001 it fails this stream only, not the others of the batch
            waiter.set_exception(error)

    def _is_over(self) -> bool:
        return self._is_superseded or self._has_sent_summary or self._answer.failure is not None

    def _take_new(self) -> list[Message]:
        """Returns one delta per sample with new tokens, and each sample's end after its last delta.

        Tokens beyond `MAX_ENTRIES` are left for the next call.
        """
        answer, render = self._answer, self._render
        messages: list[Message] = []
        self._has_unread = False
        if not self._has_started:
            if answer.started is None:
                return messages
            self._has_started = True
            messages.append(render(answer.started))
        num_left = self._max_tokens
        for index, sample in enumerate(answer.samples):
            position = self._positions[index]
            if position < sample.next_position:
                end = min(sample.next_position, position + num_left)
                messages.append(render(sample.delta(position, end)))
                num_left -= end - position
                self._positions[index] = position = end
                self.has_sent_tokens = True
                if not num_left:
                    self._has_unread = True
                    return messages
            if sample.finished is not None and index not in self._ended:
                self._ended.add(index)
                if position == sample.next_position and (tail := sample.tail()) is not None:
                    messages.append(render(tail))
                messages.append(render(sample.finished))
        if answer.summary is not None and not self._has_sent_summary:
            self._has_sent_summary = True
            messages.append(render(answer.summary))
        return messages
