from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import race
from outrider.engine.sampler.arrivals import RaceKey, RaceKeys, block_arrivals
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.order import order_keys
from outrider.engine.sampler.race import run_race
from tests.oracle.arrivals import all_arrivals
from tests.oracle.elementary import logarithm


def full_race(values, key, last=None):
    """Every token evaluated by the oracle, nothing skipped: up to the token `last` of the row's order."""
    takes_part = np.ones(len(values), dtype=np.bool_)
    if last is not None:
        order = np.argsort(-values, kind="stable")
        takes_part[order[order.tolist().index(last) + 1 :]] = False
    scores = np.where(takes_part, values - logarithm(all_arrivals(key, len(values))), -np.inf)
    return int(np.argmax(scores))


def lazy_race(values, keys, *, num_candidates, limits=None):
    """(winner, whether it is open) of each row."""
    blocks = LogitBlocks.of(torch.from_numpy(values))
    race_keys = RaceKeys.of(keys, torch.device("cpu"))
    arrivals = block_arrivals(race_keys, blocks.num_blocks)
    winners, is_open = run_race(blocks, race_keys, arrivals, num_candidates=num_candidates, limits=limits)
    return list(zip(winners.tolist(), is_open.tolist(), strict=True))


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
def test_what_the_lazy_race_decides_is_the_full_race(shape, vocab_size):
    """However few blocks it looks into: a row that it does not leave open has its winner."""
    values = logits_of(shape, 24, vocab_size)
    keys = [RaceKey(7 + i % 3, i % 2, 100 + i) for i in range(24)]
    expected = [full_race(*row) for row in zip(values, keys, strict=True)]
    for num_candidates in (1, 3, 16, 64):
        found = lazy_race(values, keys, num_candidates=num_candidates)
        assert [is_open or winner == full for (winner, is_open), full in zip(found, expected, strict=True)] == [
            True
        ] * 24
    assert lazy_race(values, keys, num_candidates=79) == [(winner, False) for winner in expected]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_limit_leaves_out_what_comes_after_it(shape):
    vocab_size = 1000
    values = logits_of(shape, 24, vocab_size)
    keys = [RaceKey(11, 0, i) for i in range(24)]
    lasts = [
        int(np.lexsort((np.arange(vocab_size), -row))[[0, 1, 5, 40, 500, 999][i % 6]]) for i, row in enumerate(values)
    ]
    expected = [full_race(row, key, last) for row, key, last in zip(values, keys, lasts, strict=True)]
    order = order_keys(torch.from_numpy(values), torch.arange(vocab_size))
    limits = order.gather(1, torch.tensor(lasts).unsqueeze(1))
    for num_candidates in (2, 16):
        found = lazy_race(values, keys, num_candidates=num_candidates, limits=limits)
        if num_candidates == 16:
            assert [winner for winner, _ in found] == expected
        assert all(is_open or winner == full for (winner, is_open), full in zip(found, expected, strict=True))


def test_sixty_four_blocks_decide_nearly_every_row_of_a_large_vocabulary():
    values = np.concatenate([logits_of("normal", 24, 151_665), logits_of("zipf", 24, 151_665)])
    keys = [RaceKey(2**63 + i, 0, 4000) for i in range(48)]
    found = lazy_race(values, keys, num_candidates=64)
    assert sum(is_open for _, is_open in found) < 12
    decided = [i for i, (_, is_open) in enumerate(found) if not is_open][::6]
    assert [found[i][0] for i in decided] == [full_race(values[i], keys[i]) for i in decided]


def test_a_bound_that_gives_up_too_early_is_noticed(monkeypatch):
    """Negative control: rows whose winner lies elsewhere would be called decided."""
    values = logits_of("normal", 64, 4096)
    keys = [RaceKey(1, 0, i) for i in range(64)]
    expected = [full_race(row, key) for row, key in zip(values, keys, strict=True)]
    monkeypatch.setattr(race, "_with_slack", lambda scores: scores + 3.0)
    found = lazy_race(values, keys, num_candidates=4)
    assert any(not is_open and winner != full for (winner, is_open), full in zip(found, expected, strict=True))


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_row_of_nan_is_decided_for_the_first_of_them(nan):
    values = logits_of("normal", 3, 200)
    values[1] = nan
    values[2, [77, 190]] = nan
    keys = [RaceKey(1, 0, i) for i in range(3)]
    limits = order_keys(torch.from_numpy(values), torch.arange(200)).amax(dim=1, keepdim=True)
    for limit in (None, limits):
        winners = [winner for winner, _ in lazy_race(values, keys, num_candidates=4, limits=limit)]
        assert winners[1:] == [0, 77]
        assert [is_open for _, is_open in lazy_race(values, keys, num_candidates=3, limits=limit)[1:]] == [True, True]
