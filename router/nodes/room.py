"""What a router knows about the room on a decode node: the requests that the node has refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.node import NodeLoad
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected


class Size(NamedTuple):
    """The size of a request, which determines the room that it needs on a decode node."""

    num_tokens: int
    num_samples: int


@dataclass(slots=True)
class Refusal:
    """A decode node's rejection of a request of this size, which keeps other requests away from the node for a while.

    It keeps all requests away for `wait_seconds`. It keeps requests of at least this size away until a report shows
    the missing room, requests of this router with as many tokens have ended there, or `NO_ROOM_RETRY_SECONDS` have
    passed.
    """

    rejected: Rejected
    at: float  # monotonic seconds
    size: Size
    num_freed_tokens: int = 0  # tokens of this router's requests that ended since then, minus those that began
    num_freed_samples: int = 0

    def keeps_out(self, size: Size, load: NodeLoad, now: float) -> bool:
        """Whether the node must not be asked for room of this size now."""
        wanted = self.rejected
        if now >= self.at + NO_ROOM_RETRY_SECONDS:
            return False
        if now < self.at + wanted.wait_seconds:
            return True  # whatever the size
        num_sequences = max(load.num_sequences_free, self.num_freed_samples)
        if num_sequences < min(size.num_samples, wanted.num_sequences_needed):
            return True
        has_blocks = load.kv_blocks_free >= wanted.kv_blocks_needed or self.num_freed_tokens >= self.size.num_tokens
        is_smaller = size.num_tokens < self.size.num_tokens or size.num_samples < self.size.num_samples
        return not (is_smaller or has_blocks)
