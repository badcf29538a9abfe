"""What the router knows of a running answer: every token with its position and the text it added.

The journal is what the client is told, and what a later attempt will go on from. Tokens
are appended at the next position only, then sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.answer import AnswerEvent, Delta, Finished
from outrider.errors import CapacityError, InternalError
from outrider.request import FinishReason, Request, TokenLogprobs
from outrider.session import SampleDone, SampleTokens
from router.text import AnswerText

_BYTES_PER_TOKEN = 96  # an entry in two lists, the id, its piece of text
_BYTES_PER_LOGPROB = 160


class JournalBudget:
    """Bytes that all journals may take. An answer's most is reserved before it starts."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.reserved_bytes = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Reserves them while the block runs. Raises: CapacityError."""
        if self.reserved_bytes + num_bytes > self._limit_bytes:
            raise CapacityError(
                f"{self.reserved_bytes} of {self._limit_bytes} journal bytes are taken, {num_bytes} more are needed",
                reason="JOURNAL_FULL",
            )
        self.reserved_bytes += num_bytes
        try:
            yield
        finally:
            self.reserved_bytes -= num_bytes


def journal_bytes(request: Request) -> int:
    """An upper bound of what the request's journal takes."""
    per_token = _BYTES_PER_TOKEN
    if request.output.logprobs is not None:
        per_token += _BYTES_PER_LOGPROB * (1 + request.output.logprobs.num_top)
    num_tokens = request.sampling.n * request.sampling.max_tokens
    return _BYTES_PER_TOKEN * len(request.prompt_token_ids) + per_token * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """What ends each sample besides its stop strings."""

    stop_token_ids: frozenset[int]  # the model's end-of-text ids included, unless ignored
    min_tokens: int
    max_tokens: int


class SampleJournal:
    """One sample: its tokens, their text and logprobs, its end, and what the client has of it."""

    def __init__(self, *, sample: int, request: Request, rules: EndRules, text: AnswerText) -> None:
        self._sample = sample
        self._rules = rules
        self._text = text
        self._start = len(request.prompt_token_ids) + len(request.generated_token_ids)
        self._num_brought = len(request.generated_token_ids)
        self._token_ids: list[int] = []
        self._texts: list[str] = []  # of each token
        self._logprobs: list[TokenLogprobs] = []  # of each token, or empty
        self._unsent_text = ""  # what was held back when the sample ended after its last token had been taken
        self._num_sent = 0
        self._end_is_sent = False
        self.finished: Finished | None = None
        self._replay(request.generated_token_ids)
        self._shows_text = not request.output.token_ids_only
        self._echo = request.prompt_text if request.output.echo and not request.generated_token_ids else ""

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that this call made."""
        return len(self._token_ids)

    @property
    def next_position(self) -> int:
        return self._start + len(self._token_ids)

    def append(self, tokens: SampleTokens) -> int:
        """Takes newly committed tokens; what follows the sample's end is dropped. Returns how many were taken.

        Raises: InternalError when they do not continue where the journal ends.
        """
        if self.is_finished:
            return 0
        if tokens.start_position != self.next_position:
            raise InternalError(
                f"sample {self._sample} got tokens at {tokens.start_position}, {self.next_position} is next"
            )
        if tokens.logprobs and len(tokens.logprobs) != len(tokens.token_ids):
            raise InternalError(f"{len(tokens.logprobs)} logprobs came with {len(tokens.token_ids)} tokens")
        num_before = len(self._token_ids)
        for token_id in tokens.token_ids:
            self._token_ids.append(token_id)
            released, has_ended = self._read(token_id, self._num_brought + len(self._token_ids) - 1)
            self._texts.append(released)
            if has_ended:
                break
        num_taken = len(self._token_ids) - num_before
        self._logprobs.extend(tokens.logprobs[:num_taken])
        return num_taken

    def finish(self, reason: FinishReason, *, stop_token_id: int | None = None) -> None:
        """Ends the sample, unless it has ended; what was held back becomes text."""
        if self.finished is None:
            self._unsent_text += self._text.finish()
            self.finished = Finished(self._sample, reason, stop_token_id=stop_token_id)

    def take_delta(self) -> Delta | None:
        """Everything that the client does not have yet; None when there is nothing."""
        first = self._num_sent
        token_ids = self._token_ids[first:]
        if not token_ids and not (self._unsent_text and self._shows_text):
            return None
        text = self._echo + "".join(self._texts[first:]) + self._unsent_text if self._shows_text else ""
        self._num_sent = len(self._token_ids)
        self._echo = self._unsent_text = ""
        return Delta(self._sample, self._start + first, tuple(token_ids), text, tuple(self._logprobs[first:]))

    def take_finished(self) -> Finished | None:
        """The sample's end, once, after its last delta."""
        if self.finished is None or self._end_is_sent:
            return None
        self._end_is_sent = True
        return self.finished

    def _read(self, token_id: int, num_generated: int) -> tuple[str, bool]:
        """(the text that a token releases, whether it ends the sample): stop token, stop string, length."""
        rules, text = self._rules, self._text
        if token_id in rules.stop_token_ids and num_generated >= rules.min_tokens:
            self.finished = Finished(self._sample, FinishReason.STOP, stop_token_id=token_id)
            return text.finish(), True
        released = text.append(token_id)
        if text.matched_stop_string is not None:
            self.finished = Finished(self._sample, FinishReason.STOP, stop_string=text.matched_stop_string)
            return released, True
        if num_generated + 1 >= rules.max_tokens:
            self.finished = Finished(self._sample, FinishReason.LENGTH)
            return released + text.finish(), True
        return released, False

    def _replay(self, token_ids: tuple[int, ...]) -> None:
        """Reads the tokens that the client has already: they count, and nothing of them is sent."""
        for num_generated, token_id in enumerate(token_ids):
            _, has_ended = self._read(token_id, num_generated)
            if has_ended:
                return


class Journal:
    """One request's answer, all samples."""

    def __init__(self, request: Request, rules: EndRules, make_text: Callable[[], AnswerText]) -> None:
        self.request = request
        self.samples = tuple(
            SampleJournal(sample=sample, request=request, rules=rules, text=make_text())
            for sample in range(request.sampling.n)
        )
        self._num_unfinished = sum(not sample.is_finished for sample in self.samples)

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def num_generated_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    def append(self, tokens: SampleTokens) -> tuple[int, bool]:
        """(tokens taken, whether they ended their sample). Raises: InternalError."""
        sample = self._sample(tokens.sample)
        if sample.is_finished:
            return 0, False
        num_taken = sample.append(tokens)
        has_ended = sample.is_finished
        self._num_unfinished -= has_ended
        return num_taken, has_ended

    def finish(self, done: SampleDone) -> None:
        """The decode node's word that a sample has ended. Raises: InternalError."""
        sample = self._sample(done.sample)
        if not sample.is_finished:
            sample.finish(done.reason, stop_token_id=done.stop_token_id)
            self._num_unfinished -= 1

    def abort(self) -> None:
        """Ends every unfinished sample."""
        for sample in self.samples:
            sample.finish(FinishReason.ABORTED)
        self._num_unfinished = 0

    def take_events(self) -> list[AnswerEvent]:
        """One delta for each sample with something new, each sample's end after its last."""
        events: list[AnswerEvent] = []
        for sample in self.samples:
            delta = sample.take_delta()
            if delta is not None:
                events.append(delta)
            finished = sample.take_finished()
            if finished is not None:
                events.append(finished)
        return events

    def _sample(self, index: int) -> SampleJournal:
        if index >= len(self.samples):
            raise InternalError(f"a decode node speaks of sample {index} of {len(self.samples)}")
        return self.samples[index]
