"""Where many sequences share a step, drafts seldom pay. Then drafting must cost next to nothing, from the start on.
A few sequences must still find out soon that a head pays.
"""

from __future__ import annotations

import pytest

from tests.speculation.simulated_batch import CURVES
from tests.speculation.simulated_sources import HEAD, LOOKUP, SourcesBatch

MIXES = ["poor", "hot", "chat", "poor+poor+poor+copied", "drawn+depths+copied+chat"]


def simulated(mix, curve, num_sequences, forward_ms):
    seconds = forward_ms / 1000.0
    lookup = (LOOKUP, {"row_seconds": 2.4e-6, "read_seconds": 5e-8})
    head = (HEAD, {"forward_seconds": seconds, "row_seconds": seconds / 40, "read_seconds": seconds / 40})
    batch = SourcesBatch(mix, curve, num_sequences, sources=[lookup, head], length=128)
    for local in batch.gatherer._local:
        if local.info.name == HEAD:
            local.unread.clear()  # a head reads features, which come with the KV
    return batch, num_sequences / CURVES[curve](num_sequences)


@pytest.mark.parametrize("forward_ms", [0.5, 3.0])
@pytest.mark.parametrize(("num_sequences", "curve"), [(16, "measured 16"), (64, "linear")])
@pytest.mark.parametrize("mix", MIXES)
def test_many_sequences_are_hardly_slower_than_without_drafts(mix, num_sequences, curve, forward_ms):
    """The rest of the time goes to trials, and at first to one call that shows what a call costs."""
    batch, plain = simulated(mix, curve, num_sequences, forward_ms)
    assert batch.rate(100) > 0.985 * plain
    assert batch.rate(400) > 0.994 * plain


def test_four_sequences_soon_find_that_a_dear_head_pays():
    rates = []
    for kind in ("chat", "chat+depths", "depths+chat"):
        batch, plain = simulated(kind, "measured 4", 4, 3.0)
        rates.append(batch.rate(400) / plain)
    assert sum(rates) / len(rates) > 1.07
