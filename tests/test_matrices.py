from __future__ import annotations

import itertools

import pytest

from tests.support.matrices import cover_pairs


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 3), (6, 10, 5, 2), (6, 11, 4, 2), (2, 2, 2, 2, 2)], ids=str)
def test_a_cover_has_every_pair_and_is_little_more_than_the_two_largest_axes(sizes):
    cases = [dict(zip("abcde", values, strict=False)) for values in itertools.product(*map(range, sizes))]
    chosen = cover_pairs(cases)
    for one, other in itertools.combinations("abcde"[: len(sizes)], 2):
        assert {(cases[i][one], cases[i][other]) for i in chosen} == {(case[one], case[other]) for case in cases}
    *_, second, first = (1, *sorted(sizes))
    assert first * second <= len(chosen) <= 1.5 * first * second


def test_a_matrix_with_holes_keeps_the_pairs_it_has():
    cases = [{"library": 0, "shape": shape, "kind": kind} for shape in range(5) for kind in range(5)]
    cases += [{"library": 1, "shape": 2, "kind": 3}]
    chosen = cover_pairs(cases)
    assert {25} < chosen
    assert {(cases[i]["shape"], cases[i]["kind"]) for i in chosen} == set(itertools.product(range(5), repeat=2))


def test_values_of_two_parameters_are_spread_over_those_of_a_third():
    """With the first of equal cases, nearly every library had the first kind only."""
    cases = [
        {"library": library, "shape": shape, "kind": kind}
        for library, shape, kind in itertools.product(range(5), range(14), range(2))
    ]
    chosen = cover_pairs(cases)
    assert len(chosen) == 5 * 14
    for library in range(5):
        assert sum(cases[i]["kind"] for i in chosen if cases[i]["library"] == library) in (6, 7, 8)


def test_nothing_is_chosen_of_nothing():
    assert cover_pairs([]) == set()
