"""Tracks the layers, tokens and heads of a transfer that have arrived."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.planes import find_plane
from outrider.kv_transfer.base import Region, TransferSpec


class Coverage:
    """The arrived (layer, token, head) cells of every plane. Not thread-safe: the transfer's lock guards it.

    A sender cuts all frames of a plane at the same heads. So two head ranges of a plane are equal or disjoint, and
    there are at most as many ranges as heads. A frame with another cut counts as overlapping.
    """

    def __init__(self, spec: TransferSpec) -> None:
        self._spec = spec
        # By plane, then by range of heads: whether each token of each layer has arrived, [num_layers, num_tokens].
        self._arrived: dict[str, dict[range, npt.NDArray[np.bool_]]] = {plane.name: {} for plane in spec.planes}

    def overlaps(self, region: Region) -> bool:
        """Returns whether a cell of this region (within bounds) has arrived, or another cut overlaps its heads."""
        heads, arrived = region.heads, self._arrived[region.plane]
        if heads not in arrived:
            return any(other.start < heads.stop and heads.start < other.stop for other in arrived)
        return bool(self._cells(region).any())

    def add(self, region: Region) -> None:
        """Marks a region as arrived. `overlaps` must be false for it."""
        heads, arrived = region.heads, self._arrived[region.plane]
        if heads not in arrived:
            plane = find_plane(self._spec.planes, region.plane)
            num_tokens = self._spec.end_token - self._spec.first_token(plane)
            arrived[heads] = np.zeros((plane.num_layers, num_tokens), dtype=np.bool_)
        self._cells(region)[:] = True

    def _cells(self, region: Region) -> npt.NDArray[np.bool_]:
        layers, tokens = region.layers, region.tokens
        first = self._spec.first_token(find_plane(self._spec.planes, region.plane))
        arrived = self._arrived[region.plane][region.heads]
        return arrived[layers.start : layers.stop, tokens.start - first : tokens.stop - first]

    def complete_until(self) -> int:
        """Returns the end of the leading tokens that have arrived for every head of every layer of every plane.

        If a plane has a window, that is the end or the start: a part of the window is of no use.
        """
        start, end = self._spec.start_token, self._spec.end_token
        is_there = np.ones(end - start, dtype=np.bool_)
        for plane in self._spec.planes:
            arrived = self._arrived[plane.name]
            if self._spec.first_token(plane) == end:
                continue
            if sum(map(len, arrived)) < plane.num_heads:  # ranges are disjoint, so heads are missing
                return start
            for tokens in arrived.values():
                if not plane.window:
                    is_there &= tokens.all(axis=0)
                elif not tokens.all():
                    return start
        if is_there.all():
            return end
        has_window = any(plane.window for plane in self._spec.planes)
        return start if has_window else start + int(is_there.argmin())
