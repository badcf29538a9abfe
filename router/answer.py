"""An answer: every token with its position and text, and who reads it. It knows no nodes.

Tokens are appended first, then told: what a later attempt goes on from, what a client that
comes back is told again, and what two attempts at once are compared with are one record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

from outrider.answer import AnswerEvent, Started, Summary
from outrider.errors import AbortedError, InternalError, OutOfRangeError, OutriderError
from outrider.request import FinishReason, Request
from outrider.session import SampleDone, SampleStart, SampleTokens
from router.detokenizer import NoText
from router.sample_answer import EndRules, SampleAnswer
from router.stop_strings import StopStringMatcher
from router.text import AnswerText
from router.tokenizer import Tokenizer


class Answer:
    """All samples of one request. Owned by the event loop.

    The record ends with a summary or a failure; until then readers wait for more. One
    reader is attached at a time: a new one ends the stream of the one before.
    """

    def __init__(self, request: Request, rules: EndRules, make_text: Callable[[], AnswerText]) -> None:
        self.request = request
        self.samples = tuple(
            SampleAnswer(sample=sample, request=request, rules=rules, text=make_text())
            for sample in range(request.sampling.n)
        )
        self.started: Started | None = None
        self.summary: Summary | None = None
        self.failure: OutriderError | None = None
        self.may_be_behind = False  # taken over from another router: its client may know more, and the same tokens
        self._reader: AnswerReader | None = None

    @property
    def is_complete(self) -> bool:
        """Every sample has ended."""
        return all(sample.finished is not None for sample in self.samples)

    @property
    def has_ended(self) -> bool:
        """Nothing more will come."""
        return self.summary is not None or self.failure is not None

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    @property
    def num_generated_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    def unfinished_samples(self) -> tuple[SampleStart, ...]:
        """What an attempt has to compute, with what is known already."""
        return tuple(
            SampleStart(sample=index, generated_token_ids=sample.generated_token_ids)
            for index, sample in enumerate(self.samples)
            if sample.finished is None
        )

    # ------------------------------------------------------------ writing

    def begin(self, started: Started) -> None:
        if self.started is None:
            self.started = started
            self._tell()

    def take(self, tokens: SampleTokens) -> tuple[int, bool]:
        """(new tokens, whether they ended their sample). Raises: TokenMismatchError, InternalError."""
        sample = self._sample(tokens.sample)
        was_finished = sample.finished is not None
        num_new = sample.take(tokens)
        if num_new:
            self._tell()
        return num_new, not was_finished and sample.finished is not None

    def finish(self, done: SampleDone) -> None:
        """A node's word that a sample has ended. Raises: InternalError."""
        if done.reason is FinishReason.ABORTED:
            raise InternalError("a decode node aborted a sample by itself")
        self._sample(done.sample).finish(done.reason, stop_token_id=done.stop_token_id)
        self._tell()

    def abort(self) -> None:
        """Ends every unfinished sample."""
        for sample in self.samples:
            sample.finish(FinishReason.ABORTED)
        self._tell()

    def close(self, summary: Summary) -> None:
        assert self.is_complete, "a summary follows the last sample's end"
        self.summary = summary
        self._tell()

    def fail(self, error: OutriderError) -> None:
        """The answer ends here. What has ended stays as it is."""
        if not self.has_ended:
            self.failure = error
            self._tell()

    # ------------------------------------------------------------ reading

    def read(self, next_positions: Mapping[int, int] | None = None) -> AnswerReader:
        """Attaches a reader that is told everything from these positions on, by sample.

        Samples that are not named start where this call's tokens start. The reader that was
        attached before ends with AbortedError. Raises: OutOfRangeError.
        """
        positions = [sample.start_position for sample in self.samples]
        for index, position in (next_positions or {}).items():
            if index >= len(self.samples):
                raise OutOfRangeError(f"the answer has {len(self.samples)} samples, there is no sample {index}")
            sample = self.samples[index]
            last = sample.last_position if self.may_be_behind and not sample.is_whole else sample.next_position
            if not sample.start_position <= position <= last:
                raise OutOfRangeError(
                    f"sample {index} has positions {sample.start_position} to {last}, {position} is not one of them"
                )
            positions[index] = position
        if self._reader is not None:
            self._reader.supersede()
        self._reader = AnswerReader(self, positions)
        return self._reader

    def leave(self, reader: AnswerReader) -> None:
        """The reader's stream is over."""
        if self._reader is reader:
            self._reader = None

    def _tell(self) -> None:
        if self._reader is not None:
            self._reader.wake()

    def _sample(self, index: int) -> SampleAnswer:
        if index >= len(self.samples):
            raise InternalError(f"a decode node speaks of sample {index} of {len(self.samples)}")
        return self.samples[index]


@dataclass(slots=True)
class _Cursor:
    """What a reader has been told of one sample."""

    position: int  # the next one
    has_end: bool = False


BEHIND_SECONDS = 0.02
"""A reader that gets its turn so late is on an event loop that has more to do than it can."""
MAX_MERGE_SECONDS = 0.1


class AnswerReader:
    """One client's stream of an answer. Slow clients get fewer, larger deltas; no node waits for them.

    So do all clients while the event loop is behind: a reader whose turn came late waits as long again, and
    what comes meanwhile is in one delta. The first tokens never wait.
    """

    def __init__(self, answer: Answer, positions: list[int]) -> None:
        self._answer = answer
        self._cursors = [_Cursor(position) for position in positions]
        self._is_superseded = False
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._news_at = 0.0  # the loop's time of the oldest news
        self._has_told_tokens = False
        self.wake()

    async def batches(self) -> AsyncGenerator[list[AnswerEvent], None]:
        """Started, then at each turn everything new, the Summary last.

        Raises: the answer's failure, after what came before it; AbortedError when another
        reader has been attached.
        """
        answer = self._answer
        has_started = False
        try:
            while True:
                await self._news.wait()
                if self._has_told_tokens:
                    await self._merge()
                self._news.clear()
                if self._is_superseded:
                    raise AbortedError("another stream of this answer was attached", reason="RESUMED_ELSEWHERE")
                events: list[AnswerEvent] = []
                if not has_started and answer.started is not None:
                    has_started = True
                    events.append(answer.started)
                if has_started:
                    events += self._take_new()
                if events:
                    yield events
                    self._news_at = self._loop.time()
                    self._news.set()  # the client's turn took time: look again
                    continue
                if answer.failure is not None:
                    raise answer.failure
                if answer.summary is not None:
                    yield [answer.summary]
                    return
        finally:
            answer.leave(self)

    def wake(self) -> None:
        if not self._news.is_set():
            self._news_at = self._loop.time()
            self._news.set()

    def supersede(self) -> None:
        self._is_superseded = True
        self.wake()

    async def _merge(self) -> None:
        late = self._loop.time() - self._news_at
        if late > BEHIND_SECONDS:
            await asyncio.sleep(min(late, MAX_MERGE_SECONDS))

    def _take_new(self) -> list[AnswerEvent]:
        """One delta for each sample with something new, each sample's end after its last."""
        events: list[AnswerEvent] = []
        for sample, cursor in zip(self._answer.samples, self._cursors, strict=True):
            if cursor.position <= sample.next_position and not cursor.has_end:
                delta = sample.delta(cursor.position)
                if delta is not None:
                    self._has_told_tokens = True
                    cursor.position += len(delta.token_ids)
                    events.append(delta)
                tail = sample.tail()
                if tail is not None:
                    events.append(tail)
            if sample.finished is not None and not cursor.has_end:
                cursor.has_end = True
                events.append(sample.finished)
        return events


def make_answer(request: Request, *, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]) -> Answer:
    """`stop_token_ids`: the request's, and the model's end-of-text ids unless the request ignores them."""
    stop, output, sampling = request.stop, request.output, request.sampling
    needs_text = bool(stop.strings) or not output.token_ids_only

    def make_text() -> AnswerText:
        detokenizer = (
            tokenizer.detokenizer(skip_special_tokens=output.skip_special_tokens, context=request.prompt_token_ids)
            if needs_text
            else NoText()
        )
        matcher = StopStringMatcher(stop.strings, include_match=stop.include_match)
        return AnswerText(detokenizer, matcher, min_tokens=sampling.min_tokens)

    rules = EndRules(
        stop_token_ids=frozenset(stop_token_ids), min_tokens=sampling.min_tokens, max_tokens=sampling.max_tokens
    )
    return Answer(request, rules, make_text)
