"""How much work may leave a node on a suspicion: a busy machine must not hedge itself to death."""

from __future__ import annotations

from collections.abc import Callable

from router.node_directory import NodeDirectory
from router.node_link import NodeLink

HEDGED_SHARE = 0.1


class HedgeBudget:
    """Counts the requests that were opened elsewhere because a node is late, until it is on time again or lost.

    One may always be, more only as far as a tenth of all that run, and all of a node that is
    silent while every other one is on time: then it is that node, and not the machine. What moves
    because a node is lost or drains is not counted.
    """

    def __init__(self, nodes: NodeDirectory, num_running: Callable[[], int]) -> None:
        self._nodes = nodes
        self._num_running = num_running

    def may_move(self, late: NodeLink) -> bool:
        """Whether one more request may be opened elsewhere because this node is late."""
        others = [link for link in self._nodes.late_nodes if link is not late]
        if late.is_silent and not others:
            return True
        num_hedges = late.num_hedges + sum(link.num_hedges for link in others)
        return num_hedges < max(1, int(self._num_running() * HEDGED_SHARE))

    def add_move(self, late: NodeLink) -> None:
        late.num_hedges += 1

    def take_back(self, late: NodeLink) -> None:
        """A move because of this node came to nothing."""
        late.num_hedges = max(late.num_hedges - 1, 0)
