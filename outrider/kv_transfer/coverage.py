"""Which layers and tokens of a transfer have arrived: disjoint rectangles, and the gaps between them."""

from __future__ import annotations

import bisect

from outrider.kv_transfer.base import MAX_MISSING, Region, TransferSpec


class Coverage:
    """Arrived cells of every plane. Not thread-safe: its transfer's lock guards it.

    For each (plane, layer) a sorted list of disjoint, unmerged token ranges, so that a
    region can be taken out again when its write fails.
    """

    def __init__(self, spec: TransferSpec) -> None:
        self._spec = spec
        self._starts: dict[str, list[list[int]]] = {p.name: [[] for _ in range(p.num_layers)] for p in spec.planes}
        self._ends: dict[str, list[list[int]]] = {p.name: [[] for _ in range(p.num_layers)] for p in spec.planes}

    def is_inside(self, region: Region) -> bool:
        """Whether the region is non-empty and within the transfer's bounds."""
        plane = self._spec.plane(region.plane)
        return (
            plane is not None
            and 0 <= region.start_layer < region.end_layer <= plane.num_layers
            and self._spec.start_token <= region.start_token < region.end_token <= self._spec.end_token
        )

    def overlaps(self, region: Region) -> bool:
        """Whether any cell of a region inside the bounds has arrived already."""
        for layer in region.layers:
            ends = self._ends[region.plane][layer]
            at = bisect.bisect_right(ends, region.start_token)  # first range that ends after our start
            if at < len(ends) and self._starts[region.plane][layer][at] < region.end_token:
                return True
        return False

    def add(self, region: Region) -> None:
        """Marks a region that does not overlap."""
        for layer in region.layers:
            starts, ends = self._starts[region.plane][layer], self._ends[region.plane][layer]
            at = bisect.bisect_left(starts, region.start_token)
            starts.insert(at, region.start_token)
            ends.insert(at, region.end_token)

    def missing(self) -> tuple[Region, ...]:
        """The gaps, equal ones of consecutive layers as one region; at most `MAX_MISSING`."""
        found: list[Region] = []
        for plane in self._spec.planes:
            first_layer, last_gaps = 0, self._gaps(plane.name, 0)
            for layer in range(1, plane.num_layers + 1):
                gaps = self._gaps(plane.name, layer) if layer < plane.num_layers else None
                if gaps == last_gaps:
                    continue
                for start, end in last_gaps:
                    found.append(
                        Region(
                            plane=plane.name, start_layer=first_layer, end_layer=layer, start_token=start, end_token=end
                        )
                    )
                    if len(found) == MAX_MISSING:
                        return tuple(found)
                if gaps is None:
                    break
                first_layer, last_gaps = layer, gaps
        return tuple(found)

    def _gaps(self, plane: str, layer: int) -> list[tuple[int, int]]:
        gaps: list[tuple[int, int]] = []
        position = self._spec.start_token
        for start, end in zip(self._starts[plane][layer], self._ends[plane][layer], strict=True):
            if start > position:
                gaps.append((position, start))
            position = end
        if position < self._spec.end_token:
            gaps.append((position, self._spec.end_token))
        return gaps
