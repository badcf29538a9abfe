"""How much memory answers may take."""

from __future__ import annotations

from outrider.errors import CapacityError
from outrider.request import Request

_BYTES_PER_TOKEN = 96  # an entry in two lists, the id, its piece of text
_BYTES_PER_LOGPROB = 160


class AnswerBudget:
    """Bytes that all answers may take. An answer's most is reserved before it starts, until it is dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.reserved_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Raises: CapacityError."""
        if self.reserved_bytes + num_bytes > self._limit_bytes:
            raise CapacityError(
                f"{self.reserved_bytes} of {self._limit_bytes} journal bytes are taken, {num_bytes} more are needed",
                reason="JOURNAL_FULL",
            )
        self.reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        assert num_bytes <= self.reserved_bytes, "more released than reserved"
        self.reserved_bytes -= num_bytes


def answer_bytes(request: Request) -> int:
    """An upper bound of what the request's answer takes."""
    per_token = _BYTES_PER_TOKEN
    if request.output.logprobs is not None:
        per_token += _BYTES_PER_LOGPROB * (1 + request.output.logprobs.num_top)
    num_tokens = request.sampling.n * request.sampling.max_tokens
    return _BYTES_PER_TOKEN * len(request.prompt_token_ids) + per_token * num_tokens
