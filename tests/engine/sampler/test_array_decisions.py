"""Decisions with either library equal the oracle's, whatever the logits, parameters, histories and drafts."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows, array_decider
from outrider.request import LogprobsMode, LogprobsRequest
from tests.oracle.random_steps import NUM_STEPS, SHAPES, Pair, random_known, random_step
from tests.support.sampler_kinds import SamplerKind


@pytest.fixture
def kind(array):
    return SamplerKind(array)


@pytest.mark.parametrize(("vocab_size", "num_steps"), NUM_STEPS.items())
def test_decisions_are_those_of_the_oracle(kind, vocab_size, num_steps, is_full):
    rng = np.random.default_rng(vocab_size)
    for _ in range(num_steps if is_full else -(-num_steps // 4)):
        Pair(vocab_size, random_known(rng, vocab_size), kind).check_random_step(rng, num_sequences=8)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_every_shape_are_decided_as_by_the_oracle(kind, shape):
    rng = np.random.default_rng(11)
    pair = Pair(1000, random_known(rng, 1000), kind)
    for _ in range(4):
        pair.check_random_step(rng, num_sequences=12, shapes=[shape])


def test_how_many_rows_are_decided_together_changes_nothing(kind, monkeypatch):
    rng = np.random.default_rng(8)
    pair = Pair(1000, random_known(rng, 1000), kind)
    logits, parts = random_step(rng, pair, 1000, num_sequences=20)
    together = pair.decide(logits, parts)[0]
    for most in (1, 3000):
        monkeypatch.setattr(array_decider, "_MAX_VALUES", most)
        assert pair.decide(logits, parts)[0] == together


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "nan"])
def test_logprobs_are_those_of_the_oracle_to_the_bit(kind, shape):
    rng = np.random.default_rng(10)
    pair = Pair(700, random_known(rng, 700), kind)
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
