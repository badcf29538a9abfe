"""Rows with the logits of some ids only are decided like rows that have -inf for all other ids."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.sampler.edits import Vocabulary
from outrider.engine.sampler.native_decider import NativeDecider
from outrider.request import SamplingParams
from tests.oracle.random_steps import SHAPES, Pair, random_known, random_step
from tests.support.sampler_kinds import NUMPY, SamplerOfKind


class SamplerOfFewIds(SamplerOfKind):
    """A sampler whose kernels get only the logits of `ids`."""

    def __init__(self, kernels, ids, **options):
        super().__init__(NUMPY, **options)
        self._ids = ids
        self.decider = NativeDecider(kernels, Vocabulary.of(options["known_token_ids"]), ids)

    def decide(self, logits, rows):
        return self.decider.decide(logits[:, self._ids], rows)


def pair_of(kernels, vocab_size, known, ids):
    """The sampler of few ids, and the oracle."""
    pair = Pair(vocab_size, known, NUMPY)
    options = {"vocab_size": vocab_size, "known_token_ids": known, "constraints": pair.samplers[0].constraints}
    pair.samplers[0] = SamplerOfFewIds(kernels, ids, **options)
    return pair


def only(ids, logits):
    without = np.full_like(logits, -np.inf)
    without[:, ids] = logits[:, ids]
    return without


@pytest.mark.parametrize(("vocab_size", "num_ids"), [(2, 1), (65, 30), (300, 299), (1000, 64), (5000, 700), (5000, 65)])
def test_decisions_are_those_of_the_oracle_for_the_whole_row(library, teams, vocab_size, num_ids, is_full):
    rng = np.random.default_rng(vocab_size + num_ids)
    for num in range(24 if is_full else 8):
        ids = np.sort(rng.permutation(vocab_size)[:num_ids])
        pair = pair_of(teams(library, 1 + num % 2 * 2), vocab_size, random_known(rng, vocab_size), ids)
        logits, parts = random_step(rng, pair, vocab_size, 8)
        found, expected = pair.decide(only(ids, logits), parts)
        assert found == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_logits_is_decided_as_expected(library, teams, shape):
    rng = np.random.default_rng(8)
    ids = np.sort(rng.permutation(3000)[:400])
    pair = pair_of(teams(library, 1), 3000, np.ones(3000, dtype=np.bool_), ids)
    logits, parts = random_step(rng, pair, 3000, 12, [shape])
    found, expected = pair.decide(only(ids, logits), parts)
    assert found == expected


def test_among_equals_the_lowest_id_wins_and_where_nothing_is_left_it_is_id_0(library, teams):
    ids = np.array([3, 70, 71, 199])
    pair = pair_of(teams(library, 1), 200, np.ones(200, dtype=np.bool_), ids)
    for temperature, logits, expected in (
        (0.0, [1.0, 2.0, 2.0, 2.0], 70),
        (0.0, [-np.inf] * 4, 0),
        (1.0, [-np.inf] * 4, 0),
        (0.0, [1.0, np.nan, np.nan, 5.0], 70),
        (1.0, [1.0, 2.0, np.nan, np.nan], 71),
    ):
        params = SamplingParams(seed=1, max_tokens=9, temperature=temperature)
        states = pair.start(params, committed=[], sample=0, prompt_token_ids=[])
        row = np.full((1, 200), -np.inf, dtype=np.float32)
        row[0, ids] = logits
        assert pair.decide(row, [(states, 4, (), ())]) == [[expected], [expected]]


def test_no_known_id_yields_id_0(library, teams):
    known = np.arange(200) < 50
    pair = pair_of(teams(library, 1), 200, known, np.array([60, 70]))
    for temperature in (0.0, 1.0):
        params = SamplingParams(seed=1, max_tokens=9, temperature=temperature)
        states = pair.start(params, committed=[], sample=0, prompt_token_ids=[])
        row = np.full((1, 200), -np.inf, dtype=np.float32)
        row[0, [60, 70]] = 1.0
        assert pair.decide(row, [(states, 4, (), ())]) == [[0], [0]]
