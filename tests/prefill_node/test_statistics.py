from __future__ import annotations

import random

import pytest

from outrider.service.telemetry.recent_sum import RATE_WINDOW_SECONDS
from prefill_node.statistics import PromptTokens
from tests.support.fake_clock import FakeClock


def test_saturation_agrees_with_a_count_of_moments():
    chance, clock = random.Random(3), FakeClock()
    tokens = PromptTokens(clock)
    moments = []  # for each tenth of a second, whether the node was busy
    outstanding = {}  # by job
    for _ in range(400):
        job_id = chance.choice([7, 8])
        outstanding[job_id] = chance.choice([0, 0, 0, 5])
        tokens.set_outstanding(job_id, outstanding[job_id])
        assert tokens.num_outstanding == sum(outstanding.values())
        for _ in range(chance.randrange(12)):
            clock.advance(0.1)
            moments.append(any(outstanding.values()))
        recent = moments[-round(RATE_WINDOW_SECONDS * 10) :]
        assert tokens.saturation() == pytest.approx(sum(recent) / RATE_WINDOW_SECONDS / 10, abs=1e-6)
    assert len(tokens._busy) <= RATE_WINDOW_SECONDS * 10  # old periods are dropped
