"""An answer that is to be one message: it ends when it would not fit."""

from __future__ import annotations

from outrider.answer import AnswerEvent, Delta
from outrider.errors import InvalidRequestError
from outrider.v1 import router_pb2
from outrider.wire.answer import complete_to_proto

_TOKEN_BYTES = 5
_LOGPROB_BYTES = 16  # of a token, and of each alternative


class WholeAnswer:
    """The events of one Complete. What cannot be sent is not computed to its end."""

    def __init__(self, num_samples: int, *, max_bytes: int) -> None:
        self._num_samples = num_samples
        self._max_bytes = max_bytes
        self._events: list[AnswerEvent] = []
        self._most_bytes = 0  # an upper bound of what the events take

    async def add(self, event: AnswerEvent) -> None:
        """Never waits. Raises: InvalidRequestError when the answer is larger than a message."""
        self._events.append(event)
        if isinstance(event, Delta):
            self._most_bytes += _most_bytes(event)
        if self._most_bytes > self._max_bytes:
            self._most_bytes = self.to_proto().ByteSize()
            if self._most_bytes > self._max_bytes:
                raise InvalidRequestError(
                    f"the answer has more than the {self._max_bytes} bytes of a message; Generate streams it",
                    field="sampling.max_tokens",
                    reason="ANSWER_TOO_LARGE",
                )

    def to_proto(self) -> router_pb2.CompleteResponse:
        return complete_to_proto(self._events, num_samples=self._num_samples)


def _most_bytes(delta: Delta) -> int:
    num_logprobs = sum(1 + len(logprobs.top) for logprobs in delta.logprobs)
    return len(delta.text.encode()) + _TOKEN_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_logprobs
