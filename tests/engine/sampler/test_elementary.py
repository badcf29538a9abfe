"""Elementary functions are accurate, and have equal bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler import elementary
from tests.oracle import elementary as oracle

MASS_ONE = 2**44


@pytest.fixture
def logarithm(array):
    """Returns a function that computes with the tested library, but takes and returns numpy's arrays."""

    def compute(values, rests=None):
        return np.asarray(elementary.logarithm(array(values), None if rests is None else array(rests)))

    return compute


@pytest.fixture
def masses_of(array):
    return lambda values, largest: np.asarray(elementary.masses_of(array(values), array(np.asarray(largest))))


def test_both_libraries_and_the_oracle_give_the_same_bits(logarithm, masses_of):
    rng = np.random.default_rng(4)
    values = np.exp(rng.uniform(-60, 60, 300_000)).astype(np.float32)
    rests = values * rng.uniform(-(2.0**-25), 2.0**-25, len(values)).astype(np.float32)
    for rest in (None, rests):
        assert np.array_equal(logarithm(values, rest).view(np.int32), oracle.logarithm(values, rest).view(np.int32))
    below = -rng.uniform(0, 40, 300_000).astype(np.float32)
    assert np.array_equal(masses_of(below, np.float32(0.0)), oracle.masses_of(below, np.float32(0.0)))


def units_in_the_last_place(values, exact):
    return np.abs(values - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def test_logarithms_are_good_to_a_unit_in_the_last_place(logarithm):
    rng = np.random.default_rng(0)
    values = np.exp(rng.uniform(-28, 4, 300_000)).astype(np.float32)  # as arrivals are
    near_one = (1 + rng.uniform(-1e-3, 1e-3, 100_000)).astype(np.float32)
    for part in (values, near_one):
        assert units_in_the_last_place(logarithm(part), np.log(part.astype(np.float64))).max() < 1.0
    assert logarithm(np.ones(1, dtype=np.float32)).tolist() == [0.0]


def test_what_rounding_took_counts(logarithm):
    rng = np.random.default_rng(1)
    small = np.exp(rng.uniform(-23, -1, 300_000)).astype(np.float32)
    rounded = np.float32(1.0) - small
    logarithms = logarithm(rounded, (np.float32(1.0) - rounded) - small)
    assert units_in_the_last_place(logarithms, np.log1p(-small.astype(np.float64))).max() < 1.0
    without = units_in_the_last_place(logarithm(rounded), np.log1p(-small.astype(np.float64)))
    assert without.max() > 1000  # negative control: small values need their rests


def test_masses_are_rounded_exponentials(masses_of):
    values = -np.random.default_rng(2).uniform(0, 40, 300_000).astype(np.float32)
    exact = np.exp(values.astype(np.float64)) * MASS_ONE
    masses = masses_of(values, np.float32(0.0))
    assert (np.abs(masses - exact) <= exact * 2.0**-23 + 0.500001).all()
    assert masses_of(np.asarray([3.0, 3.0 - 33.0, -np.inf], dtype=np.float32), np.float32(3.0)).tolist() == [
        MASS_ONE,
        0,
        0,
    ]


@pytest.mark.parametrize("largest", [np.inf, -np.inf])
def test_infinite_values_share_everything(masses_of, largest):
    values = np.asarray([largest, 1.0, -np.inf, largest], dtype=np.float32)
    values = np.minimum(values, np.float32(largest))
    expected = [MASS_ONE if value == largest else 0 for value in values.tolist()]
    assert masses_of(values, np.float32(largest)).tolist() == expected


def test_bits_do_not_depend_on_where_an_element_lies(logarithm, masses_of):
    """Vectorised loops must not compute the end of an array differently, or rows would depend on their neighbours."""
    values = np.exp(np.random.default_rng(3).uniform(-20, 3, 1027)).astype(np.float32)
    for function in (logarithm, lambda x: masses_of(-x, np.float32(0.0))):
        whole = function(values)
        for start in (0, 1, 3, 5, 1000):
            for length in (1, 2, 3, 4, 7, 9, 15, 17, 27):
                assert np.array_equal(function(values[start : start + length]), whole[start : start + length])
