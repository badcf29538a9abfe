"""Decisions in torch are the ids of the oracle, whatever the logits, parameters, histories and drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import Sampler, SampleRows, draw, torch_decider
from outrider.engine.sampler.torch_decider import TorchDecider
from outrider.request import LogprobsMode, LogprobsRequest
from tests.oracle.random_steps import SHAPES, Pair, random_known, random_params, random_step

NUM_STEPS = {1: 20, 2: 20, 63: 30, 64: 30, 65: 30, 300: 40, 1000: 40, 5000: 40, 49_152: 4, 151_936: 2}
"""Random steps by size of the vocabulary; a quarter of them but in a full run."""


@pytest.mark.parametrize(("vocab_size", "num_steps"), NUM_STEPS.items())
def test_decisions_are_those_of_the_oracle(vocab_size, num_steps, is_full):
    rng = np.random.default_rng(vocab_size)
    for _ in range(num_steps if is_full else -(-num_steps // 4)):
        pair = Pair(vocab_size, random_known(rng, vocab_size))
        logits, parts = random_step(rng, pair, vocab_size, num_sequences=8)
        before = logits.clone()
        by_torch, expected = pair.decide(logits, parts)
        assert by_torch == expected
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_round_of_all_tokens_decides_alike(shape, monkeypatch):
    """As on a GPU, where a question about a round would be a wait."""
    rng = np.random.default_rng(11)
    pair = Pair(1000, random_known(rng, 1000))
    monkeypatch.setattr(draw.Draw, "again", None)
    pair.samplers[0]._decider = TorchDecider(pair.samplers[0]._editor, in_one_round=True)
    for _ in range(4):
        logits, parts = random_step(rng, pair, 1000, num_sequences=12, shapes=[shape])
        in_one_round, expected = pair.decide(logits, parts)
        assert in_one_round == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_candidates", [1, 4])
def test_rows_that_few_blocks_leave_open_are_decided_in_further_rounds(shape, num_candidates, monkeypatch):
    monkeypatch.setattr(draw, "_USUAL_CANDIDATES", num_candidates)
    rng = np.random.default_rng(7)
    pair = Pair(3000, np.ones(3000, dtype=np.bool_))
    for _ in range(6):
        logits, parts = random_step(rng, pair, 3000, num_sequences=12, shapes=[shape])
        by_torch, expected = pair.decide(logits, parts)
        assert by_torch == expected


def test_how_rows_are_cut_into_draws_changes_nothing(monkeypatch):
    rng = np.random.default_rng(8)
    pair = Pair(1000, random_known(rng, 1000))
    logits, parts = random_step(rng, pair, 1000, num_sequences=20)
    together = pair.decide(logits, parts)[0]
    for most in (1, 3000):
        monkeypatch.setattr(torch_decider, "_MOST_VALUES", most)
        assert pair.decide(logits, parts)[0] == together


def test_most_rows_need_one_round(monkeypatch):
    """Usual logits need no more, but where top_p rejects a token."""
    monkeypatch.setattr(draw.Draw, "again", None)
    rng = np.random.default_rng(9)
    logits = rng.standard_normal((8, 49_152)).astype(np.float32) * 2
    logits[:, 100:110] += 14.0
    sampler = Sampler(vocab_size=49_152, known_token_ids=torch.ones(49_152, dtype=torch.bool))
    params = random_params(rng, 49_152, temperature=0.8, top_p=0.999, top_k=50, min_p=0.0, logit_bias=())
    state = sampler.start(params, sample=0, prompt_token_ids=[])
    assert len(sampler.sample(torch.from_numpy(logits), [SampleRows(state, 5, (0,) * 7)]).token_ids) == 8


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "nan"])
def test_logprobs_are_those_of_the_oracle_to_the_bit(shape):
    rng = np.random.default_rng(10)
    pair = Pair(700, random_known(rng, 700))
    for mode in LogprobsMode:
        logits, parts = random_step(rng, pair, 700, num_sequences=12, shapes=[shape])
        for states, *_ in parts:
            wanted = LogprobsRequest(num_top=int(rng.integers(0, 21)), mode=mode)
            for state in states:
                state.logprobs = wanted
        found, expected = (
            sampler.sample(logits, [SampleRows(states[i], *rest) for states, *rest in parts])
            for i, sampler in enumerate(pair.samplers)
        )
        assert found == expected
