"""Tokens of an attempt that wait for the logprobs of its prompt."""

from __future__ import annotations

from outrider.errors import InternalError
from outrider.session import SampleDone, SampleTokens
from outrider.wire.answer import num_packed_logprobs


class LogprobsHold:
    """A client is told the prompt's logprobs first, in Started: until an attempt has them, its tokens do not count.

    They come from the node that computes the prompt: in the prefill node's answer, which tokens may overtake, or in
    the decode node's events before its first token. If they are lost with their node, so are the tokens, and another
    attempt begins where this one did.
    """

    def __init__(self, num_logprobs: int) -> None:
        """`num_logprobs` is how many are missing: one for each token of the prompt but its first."""
        self._num_logprobs = num_logprobs
        self.forget()
        self.waiting: list[SampleTokens | SampleDone] = []

    def forget(self) -> None:
        """Forgets the logprobs that have come: their node failed, and another one sends all of them."""
        self._num_missing = self._num_logprobs
        self._pieces: list[bytes] = []

    @property
    def packed(self) -> bytes:
        """All that have come, as `outrider.wire.answer.pack_logprobs` packs them."""
        return b"".join(self._pieces)

    def take(self, packed: bytes) -> bool:
        """Takes the next ones. Returns whether all are here. Raises: InternalError where they are wrong."""
        self._num_missing -= num_packed_logprobs(packed)
        self._pieces.append(packed)
        if self._num_missing < 0:
            raise InternalError("there are more logprobs than tokens of the prompt")
        return self._num_missing == 0

    def add(self, event: SampleTokens | SampleDone, *, has_kv: bool) -> None:
        """Keeps an event back. `has_kv`: a prefill node has computed the prompt. Raises: InternalError if none has."""
        if not has_kv:
            raise InternalError("tokens came before the logprobs of the prompt")
        self.waiting.append(event)
