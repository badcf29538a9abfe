"""A prompt's tokens have the logprobs that generated tokens would have, whatever pieces they are computed in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.engine.pending import read
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.logprobs import pending_prompt_logprobs, split_scored_rows
from outrider.engine.scheduler import EngineSequence, PromptScoring, Scheduled, StepPlan
from outrider.request import LogprobsRequest, SamplingParams

VOCAB = 301
NUM_ROWS = 37


@pytest.fixture
def logits(array):
    values = 8.0 * np.random.default_rng(0).standard_normal((NUM_ROWS, VOCAB)).astype(np.float32)
    values[5] = values[5].round()  # ties
    return array(values)


@pytest.fixture
def token_ids():
    return [(7 * row * row) % VOCAB for row in range(NUM_ROWS)]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_they_are_a_log_softmax(logits, token_ids, num_top):
    (found,) = read(pending_prompt_logprobs(logits, token_ids, num_top))
    expected = torch.log_softmax(torch.as_tensor(logits).double(), dim=1)
    for row, entry in enumerate(found):
        token_id = token_ids[row]
        assert entry.token_id == token_id
        assert math.isclose(entry.logprob, float(expected[row, token_id]), abs_tol=1e-6)
        assert entry.rank == 1 + int((logits[row] > logits[row, token_id]).sum())
        order = sorted(range(VOCAB), key=lambda each, row=row: (-float(logits[row, each]), each))
        assert [top_id for top_id, _ in entry.top] == order[:num_top]
        for top_id, logprob in entry.top:
            assert math.isclose(logprob, float(expected[row, top_id]), abs_tol=1e-6)


def test_they_are_those_of_the_same_tokens_when_they_are_generated(array, logits, token_ids):
    sampler = Sampler(vocab_size=VOCAB, known_token_ids=np.ones(VOCAB, dtype=np.bool_))
    params = SamplingParams(seed=0, max_tokens=1, temperature=0.3, repetition_penalty=1.5)
    state = sampler.start(params, sample=0, prompt_token_ids=[1], logprobs=LogprobsRequest(num_top=3))
    rows = [SampleRows(state, 1 + row) for row in range(NUM_ROWS)]
    (sampled,) = read(sampler.with_logprobs(logits, rows, array(np.asarray(token_ids))))
    assert read(pending_prompt_logprobs(logits, token_ids, 3)) == [sampled.logprobs]


def test_rows_alone_have_the_same_bits(logits, token_ids):
    (together,) = read(pending_prompt_logprobs(logits, token_ids, 5))
    alone = [
        read(pending_prompt_logprobs(logits[row : row + 1], token_ids[row : row + 1], 5))[0] for row in range(NUM_ROWS)
    ]
    assert together == [entry for entries in alone for entry in entries]


def test_a_plans_last_rows_are_taken(logits, token_ids):
    def sequence(key, token_ids, **options):
        return EngineSequence(key=key, token_ids=[0, *token_ids], scoring=PromptScoring(token_ids, 2, **options))

    first, second = sequence(1, token_ids[:4]), sequence(2, token_ids[4:], num_done=2)
    plan = StepPlan(
        scheduled=(
            Scheduled(EngineSequence(key=3, token_ids=[0]), 1, 0, True),
            Scheduled(first, 4, 0, False, token_ids[:4]),
            Scheduled(second, 5, 0, False, token_ids[4:9]),
        )
    )
    others, scored = split_scored_rows(plan, logits[:12])
    assert others.tolist() == logits[:3].tolist()
    assert {each.key: list(entries) for each, entries in read(*scored)} == {
        1: read(pending_prompt_logprobs(logits[3:7], token_ids[:4], 2))[0],
        2: read(pending_prompt_logprobs(logits[7:12], token_ids[4:9], 2))[0][2:],  # two were known before a preemption
    }
    assert first.scoring is None
    assert second.scoring.num_done == 5


def test_a_plan_without_prompts_to_score_keeps_its_rows(logits):
    plan = StepPlan(scheduled=(Scheduled(EngineSequence(key=3, token_ids=[0]), 1, 0, True),))
    others, scored = split_scored_rows(plan, logits)
    assert others is logits
    assert scored == []
