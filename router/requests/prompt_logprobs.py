"""Holds back tokens of an attempt until the logprobs of its prompt arrive."""

from __future__ import annotations

from outrider.errors import InternalError
from outrider.session import SampleDone, SampleTokens
from outrider.wire.answer import num_packed_logprobs


class PromptLogprobsHold:
    """Holds back an attempt's tokens until the prompt's logprobs, which clients get first (in Started), are complete.

    The logprobs come from the node that computes the prompt. A prefill node sends them in its response, and tokens may
    arrive before that response. A decode node sends them in events before its first token. If the logprobs are lost
    with this node, the tokens held back are lost too, and another attempt begins where this one began.
    """

    def __init__(self, num_logprobs: int) -> None:
        """`num_logprobs`: the number of missing logprobs, one for each prompt token except the first."""
        self._num_logprobs = num_logprobs
        self.forget()
        self.waiting: list[SampleTokens | SampleDone] = []

    def forget(self) -> None:
        """Forgets the logprobs received so far, because their node failed and another node will send all of them."""
        self._num_missing = self._num_logprobs
        self._pieces: list[bytes] = []

    @property
    def packed(self) -> bytes:
        """All logprobs received, packed by `outrider.wire.answer.pack_logprobs`."""
        return b"".join(self._pieces)

    def take(self, packed: bytes) -> bool:
        """Takes the next logprobs. Returns whether they are complete now. Raises: InternalError if they are invalid."""
        self._num_missing -= num_packed_logprobs(packed)
        self._pieces.append(packed)
        if self._num_missing < 0:
            raise InternalError("there are more logprobs than prompt tokens")
        return self._num_missing == 0

    def add(self, event: SampleTokens | SampleDone, *, has_kv: bool) -> None:
        """Holds back an event. Raises: InternalError unless a prefill node has computed the prompt (`has_kv`)."""
        if not has_kv:
            raise InternalError("tokens came before the logprobs of the prompt")
        self.waiting.append(event)
