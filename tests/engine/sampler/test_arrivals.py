from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler.arrivals import RaceKey, arrivals_of, exponential, words_of
from tests.engine.sampler.reference import reference_arrivals
from tests.oracle import arrivals as oracle

GOLDEN_KEY = RaceKey(0x0123456789ABCDEF, 0, 1000)


@pytest.fixture
def place(array):
    """An array of the tested library, on the device where keys are put."""
    return array(np.zeros(1))


@pytest.fixture
def all_arrivals(place):
    """Returns a function that computes all arrivals with the tested library: [vocab] float32."""
    return lambda key, vocab_size: np.asarray(arrivals_of(words_of([key], place), vocab_size)[0])


def test_golden_arrivals(all_arrivals):
    arrivals = all_arrivals(GOLDEN_KEY, 49152)
    assert arrivals[7] == pytest.approx(0.014634177, rel=1e-6)  # the earliest arrival of block 0
    assert arrivals[:64].argmin() == 7
    assert arrivals[:4] == pytest.approx([0.515110, 0.683612, 0.895593, 3.293830], abs=2e-6)
    assert arrivals[49151] == pytest.approx(2.658985, abs=2e-6)
    assert int(arrivals.argmin()) == 20435
    assert arrivals.min() == pytest.approx(5.834739e-05, rel=1e-6)


@pytest.mark.parametrize("num_ids", [1, 64, 1000, 49_152, 151_936])
def test_both_libraries_and_the_oracle_give_the_same_bits(all_arrivals, num_ids):
    for key in (GOLDEN_KEY, GOLDEN_KEY._replace(sample=3), RaceKey(0, 0, 0), RaceKey(2**64 - 1, 63, 2**32 - 1)):
        expected = oracle.all_arrivals(key, num_ids)
        assert np.array_equal(all_arrivals(key, num_ids).view(np.int32), expected.view(np.int32))


def test_arrivals_agree_with_the_float64_reference(all_arrivals):
    for sample, position in [(0, 0), (5, 12345)]:
        expected = reference_arrivals(99, sample, position, 200)
        assert all_arrivals(RaceKey(99, sample, position), 200) == pytest.approx(expected, rel=1e-6)


def test_exponential_stays_finite_and_precise_at_both_ends(array):
    values = exponential(array(np.asarray([0, 1, 2**32 - 1, 2**32 - 128]))).tolist()
    assert np.isfinite(values).all()
    assert values[0] == pytest.approx(0.5 * 2.0**-32, rel=1e-6)
    assert values[1] == pytest.approx(1.5 * 2.0**-32, rel=1e-6)
    assert values[2] == pytest.approx(24 * np.log(2), rel=1e-6)


def test_arrivals_are_independent_unit_exponentials(all_arrivals):
    """They pass a Kolmogorov-Smirnov test, and are not correlated within blocks or between samples or positions."""
    vocab_size = 12800
    arrivals = [
        all_arrivals(RaceKey(5, sample, position), vocab_size).astype(np.float64)
        for sample, position in [(0, 0), (0, 1), (1, 0), (2, 77)]
    ]
    for times in arrivals:
        assert kolmogorov_smirnov(times) < 1.95
    uniform = [1 - np.exp(-times) for times in arrivals]
    for i in range(4):
        for j in range(i):
            assert abs(np.corrcoef(uniform[i], uniform[j])[0, 1]) * np.sqrt(vocab_size) < 4
        blocks = uniform[i].reshape(-1, 64)
        for shift in (1, 2, 4, 7, 32):
            pair = np.corrcoef(blocks[:, :-shift].ravel(), blocks[:, shift:].ravel())[0, 1]
            assert abs(pair) * np.sqrt(vocab_size) < 4.5
        # The minimum of a block has the distribution Exp(64), and its place is uniform.
        assert kolmogorov_smirnov(arrivals[i].reshape(-1, 64).min(axis=1) * 64) < 1.95


def test_a_wait_without_the_first_arrival_is_noticed(all_arrivals):
    """Negative control: if the block's first arrival is not added to the others, arrivals are not Exp(1)."""
    times = all_arrivals(RaceKey(5, 0, 0), 64 * 3200).reshape(-1, 64).astype(np.float64)
    first = times.min(axis=1, keepdims=True)
    assert kolmogorov_smirnov(np.where(times > first, times - first, times).ravel()) > 1.95


def kolmogorov_smirnov(times: np.ndarray) -> float:
    """Returns the statistic sqrt(n) * D against Exp(1). It exceeds 1.95 for one sample in a thousand."""
    count = len(times)
    distribution = 1 - np.exp(-np.sort(times))
    steps = np.arange(count + 1) / count
    return float(np.sqrt(count) * max((steps[1:] - distribution).max(), (distribution - steps[:-1]).max()))
