from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows
from outrider.request import LogprobsMode, LogprobsRequest
from tests.engine.sampler.reference import params_of, reference_distribution
from tests.oracle.sampler import edited

VOCAB_SIZE = 150


def random_logits(num_rows, *, ties):
    noise = np.random.default_rng(2).standard_normal((num_rows, VOCAB_SIZE)) * 2
    return (np.round(noise) if ties else noise).astype(np.float32)


def expected_logprobs(logprobs, values, token_id, num_top):
    """Returns (logprob, rank, top), found by sorting."""
    order = [i for i in np.lexsort((np.arange(len(values)), -values)) if logprobs[i] > -np.inf][:num_top]
    rank = 1 + int((values[np.isfinite(logprobs)] > values[token_id]).sum())
    return logprobs[token_id], rank, [(int(i), logprobs[i]) for i in order]


def check(answer, expected):
    logprob, rank, top = expected
    assert answer.logprob == pytest.approx(logprob, abs=1e-5)
    assert answer.rank == rank
    assert [token_id for token_id, _ in answer.top] == [token_id for token_id, _ in top]
    assert [value for _, value in answer.top] == pytest.approx([value for _, value in top], abs=1e-5)


SETTINGS = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 4},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 50},
    {"min_p": 0.2, "presence_penalty": 1.0, "logit_bias": ((3, 5.0),)},
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_logprobs_of_both_modes_are_those_of_the_reference(ties, settings, num_top, make_sampler):
    params = params_of(**settings)
    known = np.arange(VOCAB_SIZE) < 140
    known[17] = False
    logits = random_logits(6, ties=ties)
    sampler = make_sampler(VOCAB_SIZE, known)
    for mode in LogprobsMode:
        state = sampler.start(
            params,
            sample=0,
            prompt_token_ids=[3, 4],
            generated_token_ids=[5],
            stop_token_ids=[6],
            logprobs=LogprobsRequest(num_top=num_top, mode=mode),
        )
        rows = SampleRows(state, 3, (7, 8, 9, 9, 10))
        sampled = sampler.sample(logits, [rows])
        for row, decision, token_id, answer in zip(
            logits, rows.decisions(), sampled.token_ids, sampled.logprobs, strict=True
        ):
            assert answer is not None
            assert answer.token_id == token_id
            if mode is LogprobsMode.MODEL:
                values = row.astype(np.float64)
                logprobs = values - math.log(np.exp(values).sum())
            else:
                logprobs = reference_distribution(edited(row, known, decision), params)
                # Logprobs have the order of the distribution, but a logarithm does not preserve ties.
                values = np.round(logprobs, 9)
            check(answer, expected_logprobs(logprobs, values, token_id, num_top))


def test_asking_for_logprobs_changes_no_token_and_only_those_who_asked_get_them(make_sampler):
    sampler = make_sampler(VOCAB_SIZE)
    logits = random_logits(40, ties=True)
    rows, plain = [], []
    for i in range(40):
        params = params_of(seed=i, temperature=[0.0, 0.7, 1.0][i % 3], top_p=[0.8, 1.0][i % 2])
        wanted = [None, LogprobsRequest(num_top=2), LogprobsRequest(num_top=0, mode=LogprobsMode.SAMPLED)][i % 5 % 3]
        rows.append(SampleRows(sampler.start(params, sample=0, prompt_token_ids=[], logprobs=wanted), i))
        plain.append(SampleRows(sampler.start(params, sample=0, prompt_token_ids=[]), i))
    sampled = sampler.sample(logits, rows)
    assert sampled.token_ids == sampler.sample(logits, plain).token_ids
    assert [answer is not None for answer in sampled.logprobs] == [row.state.logprobs is not None for row in rows]
