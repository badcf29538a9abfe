"""Which layers, tokens and heads of a transfer have arrived, the gaps between them, and what its sender claims."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import MAX_MISSING, Region, TransferSpec

Manifest = Mapping[Region, int]
"""Of each frame that was sent: the xxh3-64 of its payload."""


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

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Within [start, end), rising."""
        for arrived_start, arrived_end in zip(self.starts, self.ends, strict=True):
            if arrived_start > start:
                yield start, arrived_start
            start = arrived_end
        if start < end:
            yield start, end


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
        start, end = self._spec.start_token, self._spec.end_token
        ranges = (tokens for _, _, layers in self._parts() for tokens in layers)
        return min((next(tokens.gaps(start, end), (end, end))[0] for tokens in ranges), default=end)

    def missing(self) -> tuple[Region, ...]:
        """The gaps, equal ones of consecutive layers as one region; at most `MAX_MISSING`."""
        return tuple(itertools.islice(self._missing(), MAX_MISSING))

    def _missing(self) -> Iterator[Region]:
        for plane, heads, layers in self._parts():
            gaps = [list(tokens.gaps(self._spec.start_token, self._spec.end_token)) for tokens in layers]
            for of_all, equal in itertools.groupby(range(plane.num_layers), key=gaps.__getitem__):
                first, *others = equal
                for start, end in of_all:
                    yield Region(plane.name, range(first, first + 1 + len(others)), range(start, end), heads)

    def _parts(self) -> Iterator[tuple[PlaneSpec, range, list[_TokenRanges]]]:
        """Each range of heads, also where nothing of it has arrived, with the tokens of each layer."""
        for plane in self._spec.planes:
            arrived = self._arrived[plane.name]
            for heads in _partition(arrived, plane.num_heads):
                yield plane, heads, arrived.get(heads) or [_TokenRanges()] * plane.num_layers


def _partition(arrived: dict[range, list[_TokenRanges]], num_heads: int) -> list[range]:
    """The ranges of which something has arrived, and those between them."""
    parts: list[range] = []
    at = 0
    for heads in sorted(arrived, key=attrgetter("start")):
        if at < heads.start:
            parts.append(range(at, heads.start))
        parts.append(heads)
        at = heads.stop
    if at < num_heads:
        parts.append(range(at, num_heads))
    return parts


def missing_regions(manifest: Manifest, arrived: Manifest, coverage: Coverage) -> tuple[Region, ...]:
    """What keeps a transfer from being complete; empty when it is complete.

    Complete means: every token of every layer of every plane has arrived, and the frames
    that arrived are exactly those of the manifest, with equal checksums. At most
    `MAX_MISSING` regions: gaps first, then frames that one side has and the other has not,
    or has differently.
    """
    differing = [region for region in {**manifest, **arrived} if manifest.get(region) != arrived.get(region)]
    return tuple(dict.fromkeys((*coverage.missing(), *differing)))[:MAX_MISSING]
