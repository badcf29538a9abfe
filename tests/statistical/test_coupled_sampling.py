"""Coupled sampling draws exactly from the distribution: chi-square against float64, with negative controls.

Every check is also run on a broken generator and must then fail, so that a check that
cannot fail is noticed. Seeds are fixed, so a test that passes always passes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler import SampleRows, arrivals
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.request import SamplingParams
from tests.statistical.chi_square import (
    PASS,
    Floats,
    chi_square_z,
    large_logits,
    pairs_z,
    probabilities,
    small_logits,
)
from tests.statistical.samplers import sampler_of
from tests.support.native_kernels import native_kernels

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(
    logits: Floats, num_draws: int, kernels: CpuKernels | None = None, **settings: object
) -> npt.NDArray[np.int64]:
    """Draws tokens of consecutive positions with equal logits, 64 rows at a time."""
    sampler = sampler_of(logits, kernels)
    state = sampler.start(SamplingParams(**{"seed": 2024, "max_tokens": 1, **settings}), sample=0, prompt_token_ids=[])
    rows = np.tile(logits.astype(np.float32), (64, 1))
    drawn: list[int] = []
    for start in range(0, num_draws, 64):
        drawn += sampler.sample(rows, [SampleRows(state, start, (0,) * 63)]).token_ids
    return np.asarray(drawn[:num_draws])


SETTINGS = [{}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.4, "top_k": 30, "top_p": 0.8}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_small_vocabulary(settings, sampler_kernels):
    logits = small_logits()
    probs = probabilities(logits, **settings)
    drawn = draw(logits, 6_400, sampler_kernels, **settings)
    assert chi_square_z(drawn, probs) < PASS
    assert pairs_z(drawn, probs) < PASS


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
def test_large_vocabulary(settings):
    """Only the quickest kernels are tested here; tests/engine compares all others with an oracle, token by token."""
    logits = large_logits()
    probs = probabilities(logits, **settings)
    drawn = draw(logits, 1_920, native_kernels(), **settings)
    assert chi_square_z(drawn, probs) < PASS
    assert pairs_z(drawn, probs) < PASS


def test_a_wrong_temperature_is_noticed():
    """This is the negative control of the tests above."""
    for logits, num_draws in ((small_logits(), 6_400), (large_logits(), 1_920)):
        drawn = draw(logits, num_draws, native_kernels(), temperature=1.15)
        assert chi_square_z(drawn, probabilities(logits)) > PASS


def test_arrivals_used_for_two_positions_are_noticed(monkeypatch):
    """Negative control: each token alone still has the exact distribution, but pairs of tokens do not."""
    key = Decision.key.fget
    monkeypatch.setattr(
        Decision, "key", property(lambda decision: key(decision)._replace(position=decision.position // 2))
    )
    probs = probabilities(small_logits())
    assert pairs_z(draw(small_logits(), 6_400), probs) > PASS


def test_waits_that_repeat_in_all_rows_are_noticed(monkeypatch):
    """Negative control: a counter without the position makes neighbouring rows draw alike."""
    draw_words = arrivals.draw

    def of_position_zero(keys, counters, purpose):
        keys = keys.copy()
        keys[0] *= purpose == 0
        return draw_words(keys, counters, purpose)

    monkeypatch.setattr(arrivals, "draw", of_position_zero)
    assert chi_square_z(draw(small_logits(), 6_400), probabilities(small_logits())) > PASS


def test_a_filter_without_renormalising_is_noticed():
    """Negative control: if top_p rejects a drawn token, the likeliest is taken, instead of drawing again."""
    probs = probabilities(small_logits(), top_p=0.6)
    assert chi_square_z(draw(small_logits(), 6_400, top_p=0.6), probs) < PASS
    drawn = draw(small_logits(), 6_400)
    assert chi_square_z(np.where(probs[drawn] > 0.0, drawn, small_logits().argmax()), probs) > PASS
