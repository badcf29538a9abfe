"""The limit of requests that may be hedged because a node is late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router.scheduling.placement import Placement


class Link:
    """A late node's link."""

    num_hedges = 0

    def __init__(self, *, is_silent=False):
        self.is_silent = is_silent


@pytest.fixture
def nodes():
    return SimpleNamespace(late_nodes=[])


@pytest.fixture
def budget(nodes):
    placement = Placement(nodes, prefill_outstanding_tokens=1024)
    placement.num_placed = 30
    return placement


def num_moves(budget, late):
    """Hedges until the limit is reached. Returns the number of hedges, or 20 if there is no limit."""
    for num in range(20):
        if not budget.may_hedge(late):
            return num
        late.num_hedges += 1
    return 20


def test_a_tenth_of_what_runs_moves_over_all_late_nodes(budget, nodes):
    nodes.late_nodes = [Link(), Link()]
    assert num_moves(budget, nodes.late_nodes[0]) == 3
    assert num_moves(budget, nodes.late_nodes[1]) == 0
    del nodes.late_nodes[0]  # this node is on time again
    assert num_moves(budget, nodes.late_nodes[0]) == 3


def test_a_move_that_came_to_nothing_leaves_room_for_another(budget, nodes):
    nodes.late_nodes = [late] = [Link()]
    num_moves(budget, late)
    late.num_hedges -= 1
    assert num_moves(budget, late) == 1


def test_all_of_a_silent_nodes_work_moves_only_while_the_others_are_on_time(budget, nodes):
    late, other = Link(is_silent=True), Link()
    nodes.late_nodes = [late, other]
    assert num_moves(budget, late) == 3
    nodes.late_nodes = [late]
    assert num_moves(budget, late) == 20
