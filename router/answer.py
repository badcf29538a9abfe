"""An answer: every token with its position and text, and who reads it. It knows no nodes.

Tokens are appended first, then told: what a later attempt goes on from, what a client that
comes back is told again, and what two attempts at once are compared with are one record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from outrider.answer import AnswerEvent, Started, Summary
from outrider.errors import InternalError, OutOfRangeError, OutriderError
from outrider.request import FinishReason, Request, TokenLogprobs
from outrider.session import SampleDone, SampleStart, SampleTokens
from outrider.wire.answer import PackedLogprobs, pack_logprobs
from router.answer_reader import AnswerReader, DeliveryBatcher
from router.answer_text import AnswerText
from router.detokenizer import ByteDetokenizer
from router.sample_answer import SampleAnswer
from router.tokenizer import Tokenizer

Message = TypeVar("Message")


class Answer:
    """All samples of one request. Owned by the event loop.

    The record ends with a summary or a failure; until then readers wait for more. One
    reader is attached at a time: a new one ends the stream of the one before.
    """

    def __init__(
        self,
        request: Request,
        started: Started,
        *,
        make_text: Callable[[], AnswerText],
        token_bytes: Callable[[int], bytes] | None = None,
        batcher: DeliveryBatcher,
    ) -> None:
        """`started` is what readers are told first, once the request is admitted.

        Where the request asks for logprobs of its prompt, it waits for them too.
        """
        self.request = request
        self._started = started
        self.needs_prompt_logprobs = False
        if request.options.prompt_logprobs is not None:
            self._first_logprobs = pack_logprobs([TokenLogprobs(request.prompt_token_ids[0], math.nan, 0)])
            self._started = replace(started, prompt_logprobs=PackedLogprobs(self._first_logprobs))
            self.needs_prompt_logprobs = len(request.prompt_token_ids) > 1
        self._batcher = batcher
        self.samples = tuple(
            SampleAnswer(sample=sample, request=request, text=make_text(), token_bytes=token_bytes)
            for sample in range(request.options.sampling.n)
        )
        self.started: Started | None = None
        self.summary: Summary | None = None
        self.failure: OutriderError | None = None
        self.may_be_behind = False  # taken over from another router: its client may know more, and the same tokens
        logprobs = request.options.logprobs
        self.entries_per_token = 1 if logprobs is None else 2 + logprobs.num_top  # itself, and its logprobs
        self._reader: AnswerReader[Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Every sample has ended, and no logprobs of the prompt are missing."""
        return not self.needs_prompt_logprobs and all(sample.finished is not None for sample in self.samples)

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

    def begin(self) -> None:
        """The request is admitted. Nothing while it needs logprobs of its prompt; later calls do nothing."""
        if self.started is None and not self.needs_prompt_logprobs:
            self.started = self._started
            self._tell()

    def take_prompt_logprobs(self, packed: bytes) -> None:
        """Of all tokens but the prompt's first, as nodes have packed them. The request is admitted; once."""
        if self.needs_prompt_logprobs:
            self.needs_prompt_logprobs = False
            self._started = replace(self._started, prompt_logprobs=PackedLogprobs(self._first_logprobs + packed))
            self.begin()

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
        """Ends every unfinished sample. Logprobs of the prompt that are missing are left out."""
        if self.needs_prompt_logprobs:
            self.needs_prompt_logprobs = False
            self._started = replace(self._started, prompt_logprobs=())
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

    def read(
        self, render: Callable[[AnswerEvent], Message], next_positions: Mapping[int, int] | None = None
    ) -> AnswerReader[Message]:
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
        reader = AnswerReader(self, positions, render, self._batcher)
        self._reader = reader
        return reader

    def leave(self, reader: AnswerReader[Any]) -> None:
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


def make_answer(request: Request, *, tokenizer: Tokenizer, started: Started, batcher: DeliveryBatcher) -> Answer:
    stop, output = request.stop, request.output
    needs_text = bool(stop.strings) or not output.token_ids_only

    def make_text() -> AnswerText:
        detokenizer = (
            tokenizer.detokenizer(skip_special_tokens=output.skip_special_tokens, context=request.prompt_token_ids)
            if needs_text
            else ByteDetokenizer(())  # nobody looks at it
        )
        return AnswerText(
            detokenizer,
            stop.strings,
            include_match=stop.include_match,
            min_tokens=request.options.sampling.min_tokens,
        )

    token_bytes = tokenizer.token_bytes if output.token_bytes else None
    return Answer(request, started, make_text=make_text, token_bytes=token_bytes, batcher=batcher)
