"""What a stream delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from outrider.v1 import router_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """The answer to a request, or the rest of an answer whose request id is known."""

    request_id: str
    request: router_pb2.GenerateRequest | None  # None: only its id is known
    resume_window_seconds: float | None  # None: it cannot be resumed
    next_positions: Mapping[int, int] = field(default_factory=dict)  # by sample, as Resume takes them

    @classmethod
    def answer_to(cls, request: router_pb2.GenerateRequest) -> Self:
        """`request` has its id."""
        window = request.resume_window
        return cls(
            request_id=request.request_id,
            request=request,
            resume_window_seconds=window.ToNanoseconds() / 1e9 if request.HasField("resume_window") else None,
        )
