"""How many requests may be opened elsewhere because a node is late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router.hedge_budget import HedgeBudget


class Link:
    """Late for the first time."""

    num_latenesses = 1

    def __init__(self, *, is_silent=False):
        self.is_late, self.is_silent = True, is_silent


@pytest.fixture
def others():
    return SimpleNamespace(are_timely=True)


@pytest.fixture
def budget(others):
    return HedgeBudget(lambda: 30, are_others_timely=lambda _late: others.are_timely)


def num_moves(budget, late):
    """Until no more may move; 20 are enough to see that there is no bound."""
    for num in range(20):
        if not budget.may_move(late):
            return num
        budget.add_move(late)
    return 20


def test_a_tenth_of_what_runs_moves_and_again_once_the_node_is_on_time(budget):
    late = Link()
    assert num_moves(budget, late) == 3
    late.is_late = False
    assert num_moves(budget, Link()) == 3


def test_a_move_that_came_to_nothing_leaves_room_for_another(budget):
    late = Link()
    num_moves(budget, late)
    budget.take_back(late)
    assert num_moves(budget, late) == 1


def test_all_of_a_silent_nodes_work_moves_only_while_the_others_are_on_time(budget, others):
    late = Link(is_silent=True)
    others.are_timely = False
    assert num_moves(budget, late) == 3
    others.are_timely = True
    assert num_moves(budget, late) == 20
