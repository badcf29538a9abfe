from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.filters import Filters, first_in_order
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.request import SamplingParams

SETTINGS = [
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999999},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 63, "top_p": 0.9},
    {"top_k": 5, "top_p": 0.3},
    {"top_k": 10_000},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8, "temperature": 1.7},
    {"min_p": 1e-30, "top_p": 0.7},
    {"min_p": 0.3, "top_k": 3, "temperature": 0.2},
]


def params_of(**settings):
    return SamplingParams(**{"seed": 5, "max_tokens": 100, **settings})


def random_logits(kind, num_rows, vocab_size):
    rng = np.random.default_rng(17)
    noise = rng.standard_normal((num_rows, vocab_size)) * 2
    if kind == "ties":
        noise = np.round(noise)
    if kind == "flat":
        noise = noise * 0
    if kind == "flat top":
        noise = np.minimum(noise, 1.0)
    if kind == "banned":
        noise = np.where(noise > 1, -np.inf, noise)
    return noise.astype(np.float32)


KINDS = ["random", "ties", "flat", "flat top", "banned"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_tokens_are_those_of_the_sorted_float64_reference(kind, settings, distribution_reference):
    params = params_of(**settings)
    for vocab_size in (5, 150, 448):
        logits = random_logits(kind, 3, vocab_size)
        blocks = LogitBlocks.of(
            logits, np.arange(3), np.full(3, params.temperature, dtype=np.float32), num_ids=vocab_size
        )
        filters = Filters([params] * 3, blocks)
        for row in range(3):
            expected = np.flatnonzero(distribution_reference(logits[row], params) > -np.inf)
            token_ids, values = filters.kept(row)
            assert sorted(token_ids[values > -np.inf].tolist()) == expected.tolist()


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("flat_share", [1, 4], ids=["by blocks", "by whole rows"])
def test_top_p_check_of_each_token_agrees_with_sorting(kind, settings, flat_share, monkeypatch):
    """The lazy check names outside exactly what the sorted list does not keep, token by token."""
    monkeypatch.setattr("outrider.engine.sampler.filters._FLAT_SHARE", flat_share)
    params = params_of(**settings)
    logits = random_logits(kind, 1, 150)
    blocks = LogitBlocks.of(
        np.repeat(logits, 150, axis=0),
        np.arange(150),
        np.full(150, params.temperature, dtype=np.float32),
        num_ids=150,
    )
    filters = Filters([params] * 150, blocks)
    limit = filters.limits[0]
    within = [
        token_id
        for token_id in range(150)
        if (value := float(blocks.value(0, token_id))) > limit.value
        or (value == limit.value and token_id <= limit.last_id)
    ]
    outside = filters.outside(within, within)
    assert set(within) - set(outside) == set(filters.kept(0)[0].tolist())
    for token_id, before in outside.items():
        assert before == (float(blocks.value(0, token_id)), token_id - 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filtered_draws_are_those_of_the_reference(kind, settings, coupled_reference, make_sampler):
    vocab_size, num_rows = 150, 12
    logits = random_logits(kind, num_rows, vocab_size)
    sampler = make_sampler(vocab_size)
    params = params_of(**settings)
    state = sampler.start(params, sample=2, prompt_token_ids=[])
    rows = [SampleRows(state, 40, tuple(range(num_rows - 1)))]
    expected = [coupled_reference(logits[j], params, sample=2, position=40 + j) for j in range(num_rows)]
    assert sampler.sample(torch.from_numpy(logits), rows).token_ids == expected


def test_first_in_order_is_a_stable_sort():
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((1, 1000)) * 3).astype(np.float32)
    blocks = LogitBlocks.of(logits, np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32), num_ids=1000)
    order = np.lexsort((np.arange(1000), -logits[0]))
    for count in (0, 1, 2, 15, 16, 17, 500, 1000, 2000):
        token_ids, values = first_in_order(blocks, 0, count)
        assert token_ids.tolist() == order[:count].tolist()
        assert values.tolist() == logits[0][order[:count]].tolist()


def test_ties_at_the_edge_of_top_k_keep_the_lowest_ids(make_sampler):
    logits = torch.zeros(1, 300)
    logits[0, 299] = 1.0
    sampler = make_sampler(300)
    state = sampler.start(params_of(top_k=3), sample=0, prompt_token_ids=[])
    drawn = {sampler.sample(logits, [SampleRows(state, position)]).token_ids[0] for position in range(100)}
    assert drawn == {0, 1, 299}


def test_top_p_one_and_top_k_zero_keep_everything(make_sampler):
    logits = torch.zeros(64, 70)
    sampler = make_sampler(70)
    state = sampler.start(params_of(), sample=0, prompt_token_ids=[])
    drawn = set()
    for start in range(0, 1280, 64):
        drawn |= set(sampler.sample(logits, [SampleRows(state, start, (0,) * 63)]).token_ids)
    assert drawn == set(range(70))
