from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler import race
from outrider.engine.sampler.arrivals import ArrivalCache, RaceKey, block_arrivals, waits_behind_winner
from outrider.engine.sampler.elementary import logarithm
from outrider.engine.sampler.filters import NO_LIMIT, Limit
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.race import run_race


def full_race(logits, temperature, key, limit=NO_LIMIT):
    """Every token evaluated with the shipped float32 primitives, nothing skipped."""
    vocab_size = len(logits)
    num_blocks = -(-vocab_size // 64)
    blocks = block_arrivals(key.seed, key.sample, [key.position], num_blocks)
    groups = np.arange(num_blocks * 16)
    waits = waits_behind_winner([key], np.zeros_like(groups), groups).reshape(-1, 64)
    times = blocks.first[0][:, None] + waits
    times[np.arange(num_blocks), blocks.winner_offsets[0]] = blocks.first[0]
    values = logits / np.float32(temperature)
    scores = values - logarithm(times.reshape(-1)[:vocab_size])
    ids = np.arange(vocab_size)
    takes_part = (values > np.float32(limit.value)) | ((values == np.float32(limit.value)) & (ids <= limit.last_id))
    return int(np.argmax(np.where(takes_part, scores, -np.inf)))


def lazy_race(logits, temperatures, keys, limits=None):
    blocks = LogitBlocks.of(
        logits, np.arange(len(logits)), np.asarray(temperatures, dtype=np.float32), num_ids=logits.shape[1]
    )
    arrivals = ArrivalCache(num_blocks=blocks.num_blocks, max_bytes=1 << 26).rows(keys)
    return run_race(blocks, arrivals, keys, limits)


def logits_of(shape, num_rows, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((num_rows, vocab_size))
    ranks = np.log(np.arange(1, vocab_size + 1))
    logits = {
        "flat": noise * 0.01,
        "equal": noise * 0,
        "normal": noise * 2.5,
        "zipf": rng.permuted(np.broadcast_to(-1.3 * ranks, noise.shape), axis=1) + noise * 0.3,
        "peaked": rng.permuted(np.broadcast_to(-8 * ranks, noise.shape), axis=1),
        "certain": np.where(np.arange(vocab_size) == vocab_size // 3, 500.0, noise),
        "ties": np.round(noise * 2) / 2,
        "holes": np.where(noise > 0.5, -np.inf, noise * 3),
        "one left": np.where(np.arange(vocab_size) == vocab_size - 1, -30.0, -np.inf) + noise * 0,
        "bf16-like": (noise * 4).astype(np.float32).view(np.uint32) & 0xFFFF0000,
    }[shape]
    if shape == "bf16-like":
        return logits.astype(np.uint32).view(np.float32)
    return logits.astype(np.float32)


SHAPES = ["flat", "equal", "normal", "zipf", "peaked", "certain", "ties", "holes", "one left", "bf16-like"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 64, 100, 4096, 5000])
def test_lazy_race_is_the_full_race(shape, vocab_size):
    logits = logits_of(shape, 24, vocab_size)
    temperatures = np.asarray([1.0, 0.7, 1.3, 0.01, 5.0, 1.0] * 4)
    keys = [RaceKey(7 + i % 3, i % 2, 100 + i) for i in range(24)]
    expected = [full_race(*row) for row in zip(logits, temperatures, keys, strict=True)]
    assert lazy_race(logits, temperatures, keys) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_lazy_race_with_limits_is_the_full_race(shape):
    vocab_size = 1000
    logits = logits_of(shape, 24, vocab_size)
    keys = [RaceKey(11, 0, i) for i in range(24)]
    limits = []
    for i, row in enumerate(logits):
        order = np.lexsort((np.arange(vocab_size), -row))
        last = order[[0, 1, 5, 40, 500, 999][i % 6]]
        limits.append(Limit(float(row[last]), int(last)))
    expected = [full_race(row, 1.0, key, limit) for row, key, limit in zip(logits, keys, limits, strict=True)]
    assert lazy_race(logits, np.ones(24), keys, limits) == expected


def test_lazy_race_on_a_large_vocabulary():
    logits = np.concatenate([logits_of("normal", 3, 151_665), logits_of("zipf", 3, 151_665)])
    keys = [RaceKey(2**63 + i, 0, 4000) for i in range(6)]
    assert lazy_race(logits, np.ones(6), keys) == [
        full_race(row, 1.0, key) for row, key in zip(logits, keys, strict=True)
    ]


def test_looking_into_too_few_blocks_is_noticed(monkeypatch):
    """Negative control: with a bound that is too tight the lazy race differs from the full one."""
    logits = logits_of("normal", 64, 4096)
    keys = [RaceKey(1, 0, i) for i in range(64)]
    expected = [full_race(row, 1.0, key) for row, key in zip(logits, keys, strict=True)]
    assert lazy_race(logits, np.ones(64), keys) == expected
    monkeypatch.setattr(race, "_with_slack", lambda scores: scores + np.float32(0.5))
    assert lazy_race(logits, np.ones(64), keys) != expected


def test_race_looks_into_few_blocks(monkeypatch):
    """The point of being lazy: on a flat distribution about 18 to 29 of 768 blocks are needed."""
    num_looked_at = []
    original = LogitBlocks.blocks
    monkeypatch.setattr(
        LogitBlocks,
        "blocks",
        lambda self, rows, blocks: num_looked_at.append(len(rows)) or original(self, rows, blocks),
    )
    logits = logits_of("flat", 1, 49152)
    for position in range(20):
        lazy_race(logits, np.ones(1), [RaceKey(3, 0, position)])
    assert np.mean(num_looked_at) < 80


def test_a_row_of_nan_is_decided_for_the_first_of_them():
    logits = logits_of("normal", 3, 200)
    logits[1] = np.nan
    logits[2, 77] = np.nan
    keys = [RaceKey(1, 0, i) for i in range(3)]
    assert lazy_race(logits, np.ones(3), keys) == [full_race(logits[0], 1.0, keys[0]), 0, 77]
