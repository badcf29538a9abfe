from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler.arrivals import (
    ArrivalCache,
    RaceKey,
    block_arrivals,
    exponential,
    waits_behind_winner,
)
from outrider.engine.sampler.philox import philox4x32, split_seed

GOLDEN_SEED = 0x0123456789ABCDEF


def all_arrivals(seed: int, sample: int, position: int, vocab_size: int) -> np.ndarray:
    """Full evaluation with the shipped float32 primitives: [vocab] float32."""
    num_blocks = -(-vocab_size // 64)
    blocks = block_arrivals(seed, sample, [position], num_blocks)
    groups = np.arange(num_blocks * 16)
    waits = waits_behind_winner([RaceKey(seed, sample, position)], np.zeros_like(groups), groups).reshape(-1, 64)
    times = blocks.first[0][:, None] + waits
    times[np.arange(num_blocks), blocks.winner_offsets[0]] = blocks.first[0]
    return times.reshape(-1)[:vocab_size]


def test_golden_words():
    key = split_seed(GOLDEN_SEED)
    words = {
        (0, 0): (0x9BA84CEC, 0xAABFA147, 0x7E39BAFD, 0x7ECCDE0E),
        (0, 1): (0x64CD5031, 0x7CDE5F23, 0x95EAD298, 0xF65C0362),
        (3, 1): (0x0C58B0E0, 0x6C1CDC8C, 0x2527A2ED, 0x6947B123),
    }
    for (sample, purpose), expected in words.items():
        assert tuple(int(word) for word in philox4x32((0, 1000, sample, purpose), key)) == expected


def test_golden_arrivals():
    blocks = block_arrivals(GOLDEN_SEED, 0, [1000], 768)
    assert blocks.first[0, 0] == pytest.approx(0.014634177, rel=1e-6)
    assert blocks.winner_offsets[0, 0] == 7
    arrivals = all_arrivals(GOLDEN_SEED, 0, 1000, 49152)
    assert arrivals[:4] == pytest.approx([0.515110, 0.683612, 0.895593, 3.293830], abs=2e-6)
    assert arrivals[49151] == pytest.approx(2.658985, abs=2e-6)
    assert int(arrivals.argmin()) == 20435
    assert arrivals.min() == pytest.approx(5.834739e-05, rel=1e-6)


def test_arrivals_agree_with_the_float64_reference(arrivals_reference):
    for sample, position in [(0, 0), (5, 12345)]:
        expected = arrivals_reference(99, sample, position, 200)
        assert all_arrivals(99, sample, position, 200) == pytest.approx(expected, rel=1e-6)


def test_exponential_stays_finite_and_precise_at_both_ends():
    words = np.asarray([0, 1, 2**32 - 1, 2**32 - 128], dtype=np.uint64)
    values = exponential(words)
    assert np.isfinite(values).all()
    assert values[0] == pytest.approx(0.5 * 2.0**-32, rel=1e-6)
    assert values[1] == pytest.approx(1.5 * 2.0**-32, rel=1e-6)
    assert values[2] == pytest.approx(24 * np.log(2), rel=1e-6)


def test_cached_rows_are_those_computed_alone():
    cache = ArrivalCache(num_blocks=5, max_bytes=1 << 20)
    keys = [
        RaceKey(seed, sample, position) for seed in (0, 7, 2**64 - 1) for sample in (0, 3) for position in range(20)
    ]
    for wanted in (keys, keys[::-1], keys[3:4]):
        rows = cache.rows(wanted)
        for i, key in enumerate(wanted):
            alone = block_arrivals(key.seed, key.sample, [key.position], 5)
            assert np.array_equal(rows.first[i], alone.first[0])
            assert np.array_equal(rows.log_first[i], alone.log_first[0])
            assert np.array_equal(rows.winner_offsets[i], alone.winner_offsets[0])


def test_cache_is_bounded_and_keeps_what_was_used_last():
    cache = ArrivalCache(num_blocks=4, max_bytes=3 * 8 * 4 * 9)
    for seed in range(50):
        cache.rows([RaceKey(seed * 8, 0, 0)])
    assert len(cache) == 3
    cache.rows([RaceKey(47 * 8, 0, 1)])
    cache.rows([RaceKey(400, 0, 0)])
    held = {seed for seed, _, _ in cache._windows}
    assert held == {49 * 8, 47 * 8, 400}


def test_arrivals_are_independent_unit_exponentials():
    """Kolmogorov-Smirnov over a vocabulary, and no correlation within blocks, samples or positions."""
    vocab_size = 12800
    arrivals = [
        all_arrivals(5, sample, position, vocab_size).astype(np.float64)
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
        # Their minima over blocks are Exp(64), the winners uniform.
        assert kolmogorov_smirnov(arrivals[i].reshape(-1, 64).min(axis=1) * 64) < 1.95


def test_a_wait_without_the_first_arrival_is_noticed():
    """Negative control: without e_b in front, arrivals are no longer Exp(1)."""
    num_blocks = 3200
    groups = np.arange(num_blocks * 16)
    waits = waits_behind_winner([RaceKey(5, 0, 0)], np.zeros_like(groups), groups).reshape(-1, 64)
    blocks = block_arrivals(5, 0, [0], num_blocks)
    waits[np.arange(num_blocks), blocks.winner_offsets[0]] = blocks.first[0]
    assert kolmogorov_smirnov(waits.ravel().astype(np.float64)) > 1.95


def kolmogorov_smirnov(times: np.ndarray) -> float:
    """sqrt(n) D against Exp(1); 1.95 is passed by one sample in a thousand."""
    count = len(times)
    distribution = 1 - np.exp(-np.sort(times))
    steps = np.arange(count + 1) / count
    return float(np.sqrt(count) * max((steps[1:] - distribution).max(), (distribution - steps[:-1]).max()))
