"""The answer of one Complete: one message, and an error as soon as it would not fit."""

from __future__ import annotations

from outrider.answer import AnswerEvent
from outrider.errors import InvalidRequestError
from outrider.v1 import router_pb2
from outrider.wire.answer import CompleteResponseBuilder


class WholeAnswer:
    """The events of one Complete. What cannot be sent is not computed to its end."""

    def __init__(self, num_samples: int, *, max_bytes: int) -> None:
        self._builder = CompleteResponseBuilder(num_samples)
        self._max_bytes = max_bytes

    async def add(self, event: AnswerEvent) -> None:
        """Never waits. Raises: InvalidRequestError when the answer is larger than a message."""
        self._builder.add(event)
        if self._builder.num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"the answer has more than the {self._max_bytes} bytes of a message; Generate streams it",
                field="sampling.max_tokens",
                reason="ANSWER_TOO_LARGE",
            )

    def to_proto(self) -> router_pb2.CompleteResponse:
        return self._builder.build()
