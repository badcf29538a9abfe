"""One sample of an answer: its tokens by position, their text and logprobs, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.answer import Delta, Finished
from outrider.errors import InternalError
from outrider.request import FinishReason, Request, TokenLogprobs
from outrider.session import SampleTokens
from router.text.answer_text import AnswerText


class TokenMismatchError(InternalError):
    """Two nodes computed different tokens for one position. Outrider has a bug, or the nodes' numerics differ."""

    reason = "TOKEN_MISMATCH"


class SampleAnswer:
    """A sample's record. New tokens are appended at the next position; tokens at known positions are compared.

    Each token is recorded with the text that it released, so the text from any position onwards is always the same.
    """

    def __init__(
        self, *, sample: int, request: Request, text: AnswerText, token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        """`token_bytes`: converts a token id to bytes, if logprobs should include them."""
        sampling = request.options.sampling
        self._sample = sample
        self._stop_token_ids = frozenset(request.options.stop_token_ids)  # with end-of-text ids unless they are ignored
        self._min_tokens = sampling.min_tokens
        self._max_tokens = sampling.max_tokens
        self._text = text
        self._token_bytes = token_bytes
        self._given_ids = request.generated_token_ids
        self.start_position = len(request.prompt_token_ids) + len(self._given_ids)
        """The position of the first token that this call generates."""
        self.next_position = self.start_position
        self.last_position = len(request.prompt_token_ids) + sampling.max_tokens
        """The position after the last token of the longest possible answer."""
        self._token_ids: list[int] = []
        self._texts: list[str] = []  # one per token
        self._logprobs: list[TokenLogprobs] = []  # one per token, or empty
        self._tail = ""  # text held back when the sample ended without another token
        self._shows_text = not request.output.token_ids_only
        self._echo = request.prompt_text if request.output.echo and self._shows_text and not self._given_ids else ""
        self.finished: Finished | None = None
        for num_generated, token_id in enumerate(self._given_ids):
            if self._read(token_id, num_generated)[1]:
                break

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this call generated."""
        return len(self._token_ids)

    @property
    def is_whole(self) -> bool:
        """Whether the sample ended by its tokens, not by an abort."""
        return self.finished is not None and self.finished.reason is not FinishReason.ABORTED

    @property
    def generated_token_ids(self) -> tuple[int, ...]:
        """The tokens that another attempt starts with: the client's generated tokens, then those of this call."""
        return (*self._given_ids, *self._token_ids)

    def token_ids_from(self, position: int) -> Sequence[int]:
        """Returns this call's tokens from an absolute position onwards."""
        return self._token_ids[max(position - self.start_position, 0) :]

    def take(self, tokens: SampleTokens) -> int:
        """Takes committed tokens, except any after the sample's end. Returns how many were new.

        Raises: TokenMismatchError if a position already has a different token; InternalError if the tokens leave a
        gap, or if there are logprobs but not one per token.
        """
        token_ids, logprobs = tokens.token_ids, tokens.logprobs
        first = tokens.start_position - self.start_position
        num_before = len(self._token_ids)
        if not 0 <= first <= num_before:
            if self.finished is not None:
                return 0
            raise InternalError(
                f"sample {self._sample} got tokens at position {tokens.start_position} instead of {self.next_position}"
            )
        if logprobs and len(logprobs) != len(token_ids):
            raise InternalError(f"{len(logprobs)} logprobs came with {len(token_ids)} tokens")
        if first < num_before:  # from another attempt
            num_known = self._compare(first, token_ids)
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if self.finished is not None:
            return 0
        num_generated = len(self._given_ids) + num_before
        for token_id in token_ids:
            released, has_ended = self._read(token_id, num_generated)
            self._token_ids.append(token_id)
            self._texts.append(released)
            num_generated += 1
            if has_ended:
                break
        num_new = len(self._token_ids) - num_before
        self.next_position += num_new
        if logprobs:
            self._logprobs.extend(logprobs[:num_new])
        return num_new

    def _compare(self, first: int, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens are already recorded. Raises: TokenMismatchError."""
        known = self._token_ids[first : first + len(token_ids)]
        for offset, (mine, theirs) in enumerate(zip(known, token_ids, strict=False)):
            if mine != theirs:
                raise TokenMismatchError(
                    f"sample {self._sample} has token {mine} at position {self.start_position + first + offset},"
                    f" but another node computed {theirs}"
                )
        return len(known)

    def finish(self, reason: FinishReason, *, stop_token_id: int | None = None) -> None:
        """Ends the sample, unless it has ended, and releases the text held back."""
        if self.finished is None:
            self._tail = self._text.finish()
            self.finished = Finished(self._sample, reason, stop_token_id=stop_token_id)

    def delta(self, position: int, end: int) -> Delta:
        """Returns the tokens of positions [position, end) with the text that they released."""
        first, last = position - self.start_position, end - self.start_position
        text = "".join(self._texts[first:last]) if self._shows_text else ""
        if first == 0 and self._echo:
            text = self._echo + text
        logprobs = tuple(map(self._with_bytes, self._logprobs[first:last])) if self._logprobs else ()
        return Delta(self._sample, position, tuple(self._token_ids[first:last]), text, logprobs)

    def _with_bytes(self, value: TokenLogprobs) -> TokenLogprobs:
        if self._token_bytes is None:
            return value
        top_bytes = tuple(self._token_bytes(token_id) for token_id, _ in value.top)
        return replace(value, token_bytes=self._token_bytes(value.token_id), top_bytes=top_bytes)

    def tail(self) -> Delta | None:
        """Returns the text that was held back when the sample ended without another token, if any.

        It is a separate delta, so that a client that reconnects can tell whether it already has this text.
        """
        if not (self._tail and self._shows_text):
            return None
        return Delta(self._sample, self.next_position, (), self._tail)

    def _read(self, token_id: int, num_generated: int) -> tuple[str, bool]:
        """Returns (the text that a token releases, whether it ends the sample by stop token, stop string or length)."""
        text = self._text
        if token_id in self._stop_token_ids and num_generated >= self._min_tokens:
            self.finished = Finished(self._sample, FinishReason.STOP, stop_token_id=token_id)
            return text.finish(), True
        released = text.append(token_id)
        if text.matched_stop_string is not None:
            self.finished = Finished(self._sample, FinishReason.STOP, stop_string=text.matched_stop_string)
            return released, True
        if num_generated + 1 >= self._max_tokens:
            self.finished = Finished(self._sample, FinishReason.LENGTH)
            return released + text.finish(), True
        return released, False
