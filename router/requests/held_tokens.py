"""Tokens of an attempt that wait for the logprobs of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.errors import InternalError, OutriderError, PeerLostError
from outrider.prefill import PrefillFigures
from outrider.session import KvReady, PromptLogprobs, SampleDone, SampleTokens, SequenceGroupEvent
from outrider.wire.answer import num_packed_logprobs
from router.requests.answer import Answer


class HeldTokens:
    """A client is told the prompt's logprobs first, in Started: until an attempt has them, its tokens do not count.

    They come from the node that computes the prompt: in the prefill node's answer, which tokens may overtake, or in the
    decode node's events before its first token. If they are lost with their node, so are the tokens, and another
    attempt begins where this one did. Owned by the event loop.
    """

    def __init__(self, answer: Answer, release: Callable[[list[SampleTokens | SampleDone]], None]) -> None:
        """`release` is called once, with what has waited, when the answer has the logprobs. Not if it needs none."""
        self._answer = answer
        self._release = release
        self.is_holding = answer.needs_prompt_logprobs
        self._num_missing = len(answer.request.prompt_token_ids) - 1
        self._pieces: list[bytes] = []
        self._waiting: list[SampleTokens | SampleDone] = []
        self._is_transferred = False  # the KV: a prefill node has the logprobs

    def takes(self, event: SequenceGroupEvent) -> bool:
        """Whether the event is for here, or waits here.

        Raises: InternalError for a node that breaks the protocol.
        """
        if not self.is_holding:
            return isinstance(event, PromptLogprobs)
        match event:
            case PromptLogprobs():
                self._take(event.packed)
            case SampleTokens() | SampleDone():
                if not self._is_transferred:
                    raise InternalError("tokens came before the logprobs of the prompt")
                self._waiting.append(event)
            case _:
                self._is_transferred |= isinstance(event, KvReady)
                return False
        return True

    def take_answer(self, prefill: asyncio.Task[PrefillFigures]) -> PeerLostError | None:
        """Takes the logprobs from a prefill node's answer, or says why it has none. Nothing where none are wanted."""
        if not self.is_holding:
            return None
        try:
            self._take(prefill.result().prompt_logprobs)
        except OutriderError as error:
            return error if isinstance(error, PeerLostError) else PeerLostError(error.message)
        return PeerLostError("the prefill node has not sent all logprobs of the prompt") if self.is_holding else None

    def _take(self, packed: bytes) -> None:
        """The next ones. Raises: InternalError for what cannot be read, or is too much."""
        self._num_missing -= num_packed_logprobs(packed)
        self._pieces.append(packed)
        if self._num_missing < 0:
            raise InternalError("there are more logprobs than tokens of the prompt")
        if self._num_missing == 0:
            self.is_holding = False
            self._answer.take_prompt_logprobs(b"".join(self._pieces))
            self._release(self._waiting)
