"""The race of our Triton kernel, in the interpreter, against every arrival computed by the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler.arrivals import RaceKey, RaceKeys, block_arrivals
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.order import order_keys
from outrider.engine.sampler.race import run_race
from tests.oracle.arrivals import all_arrivals
from tests.oracle.elementary import logarithm

kernels = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.gpu_kernels.race")

CPU = torch.device("cpu")
KEYS = [RaceKey(0x0123456789ABCDEF, 0, 1000), RaceKey(2**64 - 1, 3, 2**31), RaceKey(5, 1, 7)]


def whole_race(values, keys, limits=None):
    blocks = LogitBlocks.of(torch.from_numpy(values))
    return kernels.run_whole_race(blocks.values.flatten(1), RaceKeys.of(keys, CPU).words, limits).tolist()


def test_golden_arrivals_decide_a_flat_row():
    assert whole_race(np.zeros((1, 49152), dtype=np.float32), KEYS[:1]) == [20435]


@pytest.mark.parametrize("vocab_size", [1, 64, 1500, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_winners_are_the_oracles(vocab_size, scale):
    rng = np.random.default_rng(vocab_size)
    values = (np.round(rng.standard_normal((len(KEYS), vocab_size)) * 4) * scale).astype(np.float32)  # with ties
    scores = [row - logarithm(all_arrivals(key, vocab_size)) for row, key in zip(values, KEYS, strict=True)]
    assert whole_race(values, KEYS) == [int(np.argmax(each)) for each in scores]


def test_winners_within_limits_are_torchs():
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((len(KEYS), 3000)) * 2).astype(np.float32)
    blocks, keys = LogitBlocks.of(torch.from_numpy(values)), RaceKeys.of(KEYS, CPU)
    ids = torch.arange(3000)
    limits = order_keys(torch.from_numpy(values), ids).topk(40, dim=1).values[:, -1:]
    expected, is_open = run_race(
        blocks, keys, block_arrivals(keys, blocks.num_blocks), num_candidates=blocks.num_blocks, limits=limits
    )
    assert not is_open.any()
    assert whole_race(values, KEYS, limits) == expected.tolist()
    assert whole_race(values, KEYS) != expected.tolist()


def test_rows_without_an_order_are_decided_as_everywhere():
    values = np.full((3, 200), -np.inf, dtype=np.float32)
    values[1, [17, 90]] = np.nan
    values[2, 150] = -30.0
    assert whole_race(values, KEYS) == [0, 17, 150]
