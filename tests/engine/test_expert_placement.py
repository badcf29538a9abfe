"""Which experts get a second copy: properties of the choice for any load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.expert_placement import choose_copies, home_range, home_ranks, rank_loads

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(LOADS, st.integers(1, 8), st.integers(0, 4))
def test_copies_fit_the_memory_and_never_make_the_busiest_rank_busier(loads, num_ranks, num_spares):
    copies = choose_copies(loads, num_ranks=num_ranks, num_spares=num_spares)
    homes = home_ranks(len(loads), num_ranks)
    for rank in range(num_ranks):
        own = [expert for expert, at in copies.items() if at == rank]
        assert len(own) <= num_spares
        assert all(homes[expert] != rank for expert in own)
    before, after = (rank_loads(loads, each, num_ranks=num_ranks) for each in ({}, copies))
    assert sum(before) == sum(after) == sum(loads)
    assert max(after) <= max(before)
    assert copies == choose_copies(loads, num_ranks=num_ranks, num_spares=num_spares)


@given(st.integers(1, 40), st.integers(1, 8))
def test_each_expert_has_one_home_and_homes_have_about_equally_many(num_experts, num_ranks):
    ranges = [home_range(num_experts, num_ranks, rank) for rank in range(num_ranks)]
    assert [expert for own in ranges for expert in own] == list(range(num_experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("loads", "num_spares", "copies"),
    [
        ([90, 2, 1, 1], 1, {0: 1}),
        ([90, 40, 1, 1], 1, {0: 1}),
        ([90, 80, 1, 1], 2, {0: 1, 1: 1}),
        ([5, 5, 5, 5], 2, {}),
        ([0, 0, 0, 0], 2, {}),
        ([90, 2, 1, 1], 0, {}),
    ],
)
def test_the_busiest_rank_shares_its_busiest_expert(loads, num_spares, copies):
    assert choose_copies(loads, num_ranks=2, num_spares=num_spares) == copies
