"""How much work may leave a node on a suspicion: a busy machine must not hedge itself to death."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from router.node_link import NodeLink

HEDGED_SHARE = 0.1


class HedgeBudget:
    """Counts the requests that were opened elsewhere because a node is late, until it is on time again or lost.

    One may always be, more only as far as a tenth of all that run, and all of a node that is
    silent while every other one is on time: then it is that node, and not the machine. What moves
    because a node is lost or drains is not counted.
    """

    def __init__(self, num_running: Callable[[], int], *, are_others_timely: Callable[[NodeLink], bool]) -> None:
        self._num_running = num_running
        self._are_others_timely = are_others_timely
        self._moves: Counter[tuple[NodeLink, int]] = Counter()  # by node and the time that it became late

    def may_move(self, late: NodeLink) -> bool:
        """Whether one more request may be opened elsewhere because this node is late."""
        if late.is_silent and self._are_others_timely(late):
            return True
        self._moves = Counter(
            {
                (link, nth): num
                for (link, nth), num in self._moves.items()
                if link.is_late and link.num_latenesses == nth
            }
        )
        return self._moves.total() < max(1, int(self._num_running() * HEDGED_SHARE))

    def add_move(self, late: NodeLink) -> None:
        self._moves[late, late.num_latenesses] += 1

    def take_back(self, late: NodeLink) -> None:
        """A move because of this node came to nothing."""
        key = late, late.num_latenesses
        if self._moves[key] > 0:
            self._moves[key] -= 1
