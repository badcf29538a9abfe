"""Numpy and torch give the same bits: distributions, logprobs and the tokens that verification methods commit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from outrider.engine.arrays import map_row_chunks
from outrider.engine.sampler import SampleRows, logprobs
from outrider.engine.sampler.order import order_keys
from outrider.request import LogprobsMode, LogprobsRequest, VerificationMethod
from outrider.speculation.token_distribution import TokenDistribution
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from outrider.speculation.verify.rows import draft_token_masses
from tests.oracle.random_steps import SHAPES, logits_of, random_known, random_params
from tests.support.random_masks import RandomMasks
from tests.support.sampler_kinds import NUMPY, TORCH, SamplerOfKind
from tests.support.verifying import verify_now

SIZES = [1, 63, 65, 700, 5000]


def bits(array):
    """Returns an array's dtype, shape and bits. Compared by bits, NaN equals itself, and 0.0 differs from -0.0."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.dtype, array.shape, array.tobytes()


def edge_cases(vocab_size):
    """Returns rows of values for which arithmetic has special rules."""
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, 1.0]
    rows = [np.resize(np.roll(special, shift), vocab_size) for shift in range(len(special))]
    rows += [np.resize(each, vocab_size) for each in ([0.0, -0.0], [-np.inf], [np.inf, 1.0], [-0.0, -np.inf, -1.0])]
    return np.asarray(rows, dtype=np.float32)


def rows_of(vocab_size, rng):
    return np.concatenate([edge_cases(vocab_size), [logits_of(shape, vocab_size, rng) for shape in SHAPES]])


@pytest.fixture(params=SIZES)
def vocab_size(request):
    return request.param


@pytest.fixture
def samplers(vocab_size):
    known, masks = random_known(np.random.default_rng(vocab_size), vocab_size), RandomMasks(vocab_size)
    return [
        SamplerOfKind(kind, vocab_size=vocab_size, known_token_ids=known, constraints=masks) for kind in (NUMPY, TORCH)
    ]


SETTINGS = [
    {},
    {"top_k": 10**6, "top_p": 1e-9, "min_p": 0.0},
    {"top_k": 7, "top_p": 1e-6, "temperature": 1e30},
    {"top_k": 0, "top_p": 1.0 - 2.0**-53, "min_p": 0.0, "temperature": 1.0},
    {"top_k": 0, "top_p": 0.6, "min_p": 1.0, "temperature": 0.3},
    {"top_k": 3, "top_p": 0.9, "min_p": 1e-30, "temperature": 20.0},
]


def starts(samplers, rng, vocab_size, asked=None):
    """Returns each sampler's state of one sample, with random parameters and one of SETTINGS."""
    params = random_params(rng, vocab_size, **SETTINGS[rng.integers(len(SETTINGS))])
    options = {
        "sample": int(rng.integers(4)),
        "prompt_token_ids": rng.integers(0, vocab_size + 2, 20).tolist(),
        "generated_token_ids": rng.integers(0, vocab_size, 5).tolist(),
        "stop_token_ids": [0],
        "logprobs": asked,
    }
    return [sampler.start(params, **options) for sampler in samplers]


def test_distributions_have_the_same_bits(samplers, vocab_size):
    rng = np.random.default_rng(1)
    for _ in range(6):
        logits = rows_of(vocab_size, rng)
        states = [starts(samplers, rng, vocab_size) for _ in logits]
        one, other = (
            sampler.distribution(logits, [SampleRows(each[i], 9) for each in states])
            for i, sampler in enumerate(samplers)
        )
        assert bits(one) == bits(other)


def test_keys_and_tables_of_logprobs_have_the_same_bits(vocab_size):
    """Rows with NaN are excluded, since their masses are undefined and not used."""
    rng = np.random.default_rng(2)
    logits = rows_of(vocab_size, rng)
    token_ids = rng.integers(0, vocab_size, len(logits))
    assert bits(order_keys(logits)) == bits(order_keys(TORCH.array(logits)))
    has_mass = ~np.isnan(logits).any(axis=1)
    assert 0 < has_mass.sum() < len(logits)
    for num_top in {0, 1, min(20, vocab_size)}:
        tables = []
        for kind in (NUMPY, TORCH):
            table = map_row_chunks(partial(logprobs._table, num_top), kind.array(logits), kind.array(token_ids))
            tables.append(np.asarray(table).copy())
            tables[-1][:, 2] += 0.0  # turns -0.0 into 0.0, as the largest value may be a zero of either sign
        one, other = tables
        assert bits(one[has_mass]) == bits(other[has_mass])
        assert np.array_equal(np.delete(one, 3, axis=1), np.delete(other, 3, axis=1), equal_nan=True)


def random_draft(rng, vocab_size):
    """Returns 1 to 5 tokens, some beyond the vocabulary, and each one's distribution, or no distributions at all."""
    token_ids = tuple(rng.integers(0, vocab_size + 3, rng.integers(1, 6)).tolist())
    if rng.random() < 0.3:
        return token_ids, ()
    distributions = []
    for token_id in token_ids:
        others = set(rng.integers(0, vocab_size + 40, rng.integers(0, 32)).tolist()) - {token_id}
        weights = rng.random(len(others) + 1).astype(np.float32)
        weights /= weights.sum()
        distributions.append(TokenDistribution((token_id, *others), tuple(weights.tolist())))
    return token_ids, tuple(distributions)


@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.REJECTION])
def test_drafts_have_the_same_outcome(samplers, vocab_size, method):
    """Tokens, logprobs and acceptance are equal. Typical acceptance is excluded: it does not promise equal bits."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        drafts = [random_draft(rng, vocab_size) for _ in range(10)]
        asked = [LogprobsRequest(num_top=3, mode=mode) for mode in LogprobsMode]
        states = [starts(samplers, rng, vocab_size, asked[place] if place < 2 else None) for place in range(10)]
        logits = rng.permutation(np.concatenate([rows_of(vocab_size, rng) for _ in range(2)]))
        logits = logits[: sum(len(token_ids) + 1 for token_ids, _ in drafts)]
        rows = [
            [
                DraftRows(SampleRows(each[i], 9, token_ids), distributions, method)
                for each, (token_ids, distributions) in zip(states, drafts, strict=True)
            ]
            for i in range(2)
        ]
        masses, outcomes = [], []
        for sampler, own in zip(samplers, rows, strict=True):
            masses.append(bits(draft_token_masses(sampler, sampler.array(logits), own)))
            outcomes.append(repr(verify_now(RequestVerifier(sampler), logits, own)))  # repr, because NaN != NaN
        assert masses[0] == masses[1]
        assert outcomes[0] == outcomes[1]
