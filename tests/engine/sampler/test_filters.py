from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.filters import Filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.order import ids_of_keys, lowest_keys, order_keys
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


def blocks_of(logits, params):
    """After step 5, as the sampler has them."""
    return LogitBlocks.of(torch.from_numpy(logits / np.float32(params.temperature)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_tokens_are_those_of_the_sorted_float64_reference(kind, settings, distribution_reference):
    params = params_of(**settings)
    for vocab_size in (5, 150, 448):
        logits = random_logits(kind, 3, vocab_size)
        blocks = blocks_of(logits, params)
        filters = Filters.of([params] * 3, blocks, num_candidates=blocks.num_blocks)
        is_kept = (filters.keys >= filters.limits_with_top_p()).numpy()[:, :vocab_size]
        for row in range(3):
            expected = np.flatnonzero(distribution_reference(logits[row], params) > -np.inf)
            assert np.flatnonzero(is_kept[row] & (logits[row] > -np.inf)).tolist() == expected.tolist()


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_candidates", [1, 2, 8])
def test_top_p_check_of_each_token_agrees_with_sorting(kind, settings, num_candidates):
    """What the check calls out is what the sorted order does not keep, token by token, or it says that it is open."""
    params, num_ids = params_of(**settings), 448
    logits = np.repeat(random_logits(kind, 1, num_ids), num_ids, axis=0)
    blocks = blocks_of(logits, params)
    keys = order_keys(blocks.values.flatten(1)[:1, :num_ids], torch.arange(num_ids))
    sorting = Filters.of([params], blocks.select(torch.tensor([0])), num_candidates=blocks.num_blocks)
    is_kept = (keys >= sorting.limits_with_top_p())[0]
    is_within = (keys >= sorting.limits)[0]

    filters = Filters.of([params] * num_ids, blocks, num_candidates=num_candidates)
    is_out, is_open, narrowed = filters.check(keys.T)
    is_out, is_open = is_out.squeeze(1), is_open.squeeze(1)
    decided = is_within & ~is_open
    assert torch.equal(is_out[decided], ~is_kept[decided])
    assert torch.equal(narrowed.limits[is_out], keys.T[is_out] + 1)
    assert torch.equal(narrowed.limits[~is_out], filters.limits[~is_out])
    if num_candidates >= blocks.num_blocks:
        assert not is_open.any()


def test_the_blocks_of_the_largest_values_decide_for_usual_logits():
    """The point of looking into few blocks: a distribution with most of its mass in ten tokens leaves no row open."""
    logits = random_logits("random", 16, 49_152)
    logits[:, :10] += 15.0
    params = params_of(top_p=0.95)
    blocks = blocks_of(logits, params)
    filters = Filters.of([params] * 16, blocks, num_candidates=64)
    winners = blocks.values.flatten(1).argmax(dim=1)
    is_out, is_open, _ = filters.check(order_keys(blocks.token_values(winners), winners).unsqueeze(1))
    assert not is_out.any()
    assert not is_open.any()


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


def test_keys_sort_as_values_do_and_equals_by_rising_id():
    rng = np.random.default_rng(0)
    values = np.round(rng.standard_normal(1000) * 3).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38]
    keys = order_keys(torch.from_numpy(values), torch.arange(1000))
    order = keys.argsort(descending=True)
    assert order.tolist() == np.argsort(-values, kind="stable").tolist()
    assert torch.equal(ids_of_keys(keys[order]), order)
    lowest = lowest_keys(torch.from_numpy(values))
    assert torch.equal(keys[:, None] >= lowest[None], torch.from_numpy(values[:, None] >= values[None]))


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
