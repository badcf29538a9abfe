"""The last minute's history of `outrider top`, for figures that a single report lacks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from outrider.node import ClusterStatus, NodeState

RATE_CELLS = 12
CELL_SECONDS = 5.0
STEP_SECONDS = 10
MOVE_SECONDS = 60


class _Point(NamedTuple):
    bucket: int
    at: float  # monotonic seconds
    value: float


class Trail:
    """The latest value in each of the last time buckets, independent of the rate of reports."""

    def __init__(self, *, bucket_seconds: float, num_buckets: int) -> None:
        self._bucket_seconds = bucket_seconds
        self._num_buckets = num_buckets
        self._points: deque[_Point] = deque()

    def add(self, at: float, value: float) -> None:
        bucket = int(at // self._bucket_seconds)
        if self._points and self._points[-1].bucket == bucket:
            self._points.pop()
        self._points.append(_Point(bucket, at, value))
        while len(self._points) > 2 and self._points[0].bucket <= bucket - self._num_buckets:
            self._points.popleft()  # two points always remain, since a rise needs two

    def add_count(self, at: float, count: float) -> None:
        """Adds a counter's value; a lower value means that the counter was reset."""
        if self._points and count < self._points[-1].value:
            self._points.clear()
        self.add(at, count)

    def clear(self) -> None:
        self._points.clear()

    @property
    def rise(self) -> float:
        """The difference between the last value and the first."""
        return self._points[-1].value - self._points[0].value if self._points else 0.0

    @property
    def rise_per_second(self) -> float | None:
        """The rise per second; None until there are two values."""
        seconds = self._points[-1].at - self._points[0].at if self._points else 0.0
        return self.rise / seconds if seconds > 0.0 else None

    def by_bucket(self) -> list[float | None]:
        """Returns the value of every bucket up to the last one with a value; None for a bucket without a report."""
        if not self._points:
            return [None] * self._num_buckets
        first = self._points[-1].bucket - self._num_buckets + 1
        values: list[float | None] = [None] * self._num_buckets
        for point in self._points:
            if point.bucket >= first:
                values[point.bucket - first] = point.value
        return values


class NodeTrail:
    """The history of one node."""

    def __init__(self) -> None:
        self.steps = Trail(bucket_seconds=1.0, num_buckets=STEP_SECONDS + 1)
        self.tokens_per_second = Trail(bucket_seconds=CELL_SECONDS, num_buckets=RATE_CELLS)


class History:
    """The last report, and figures of earlier ones. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.status: ClusterStatus | None = None
        self.at = 0.0  # time of the last report
        self._moves = Trail(bucket_seconds=1.0, num_buckets=MOVE_SECONDS + 1)
        self._nodes: dict[str, NodeTrail] = {}

    def add(self, status: ClusterStatus, at: float) -> None:
        self.status, self.at = status, at
        self._moves.add_count(at, status.num_moves)
        self._nodes = {node.name: self._nodes.get(node.name) or NodeTrail() for node in status.nodes}
        for node in status.nodes:
            trail = self._nodes[node.name]
            trail.tokens_per_second.add(at, node.load.tokens_per_second)
            if node.state in (NodeState.SERVING, NodeState.DRAINING):
                trail.steps.add_count(at, node.step)
            else:
                trail.steps.clear()  # a lost node's counter shows 0 until the node is back

    def change_router(self) -> None:
        """Resets the counters, because the next reports are from another router, which has its own."""
        self._moves.clear()

    @property
    def moves_in_last_minute(self) -> int:
        """Number of migrations in the last minute, or in the part of it that was watched."""
        return int(self._moves.rise)

    def of(self, name: str) -> NodeTrail:
        """Raises: KeyError if the node is not in the last report."""
        return self._nodes[name]
