"""Which layers, tokens and heads of a transfer have arrived."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from outrider.kv_transfer.base import Region, TransferSpec


@dataclass(slots=True)
class _TokenRanges:
    """Sorted, disjoint, unmerged."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def overlap(self, start: int, end: int) -> bool:
        at = bisect.bisect_right(self.ends, start)  # the first that ends after our start
        return at < len(self.ends) and self.starts[at] < end

    def add(self, start: int, end: int) -> None:
        at = bisect.bisect_left(self.starts, start)
        self.starts.insert(at, start)
        self.ends.insert(at, end)

    def contiguous_until(self, start: int) -> int:
        """The end of what has arrived without a gap from `start` on, before which nothing has."""
        for arrived_start, arrived_end in zip(self.starts, self.ends, strict=True):
            if arrived_start > start:
                break
            start = arrived_end
        return start


class Coverage:
    """Arrived cells of every plane. Not thread-safe: its transfer's lock guards it.

    A sender cuts all frames of a plane at the same heads. So two head ranges of a plane are equal or disjoint, and
    there are at most as many as heads; a frame that is cut at others overlaps.
    """

    def __init__(self, spec: TransferSpec) -> None:
        self._spec = spec
        # By plane, then by range of heads: the tokens of each layer.
        self._arrived: dict[str, dict[range, list[_TokenRanges]]] = {plane.name: {} for plane in spec.planes}

    def overlaps(self, region: Region) -> bool:
        """Whether any cell of a region inside the bounds has arrived already, or its heads are cut at other places."""
        heads, tokens, arrived = region.heads, region.tokens, self._arrived[region.plane]
        if heads not in arrived:
            return any(other.start < heads.stop and heads.start < other.stop for other in arrived)
        return any(arrived[heads][layer].overlap(tokens.start, tokens.stop) for layer in region.layers)

    def add(self, region: Region) -> None:
        """Marks a region that does not overlap."""
        heads, arrived = region.heads, self._arrived[region.plane]
        if heads not in arrived:
            plane = self._spec.plane(region.plane)
            assert plane is not None, "the region is inside"
            arrived[heads] = [_TokenRanges() for _ in range(plane.num_layers)]
        for layer in region.layers:
            arrived[heads][layer].add(region.tokens.start, region.tokens.stop)

    def complete_until(self) -> int:
        """The token up to which every head of every layer of every plane has arrived."""
        start, until = self._spec.start_token, self._spec.end_token
        for plane in self._spec.planes:
            arrived = self._arrived[plane.name]
            if sum(map(len, arrived)) < plane.num_heads:  # they are disjoint
                return start
            until = min(until, *(tokens.contiguous_until(start) for layers in arrived.values() for tokens in layers))
        return until
