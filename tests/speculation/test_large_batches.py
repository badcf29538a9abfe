"""Where many sequences share a step, drafts seldom pay. Then drafting must cost next to nothing, from the start on."""

from __future__ import annotations

import pytest

from tests.speculation.simulated_batch import CURVES
from tests.speculation.simulated_sources import HEAD, LOOKUP, SourcesBatch

MIXES = ["poor", "hot", "chat", "poor+poor+poor+copied", "drawn+depths+copied+chat"]


@pytest.mark.parametrize("forward_ms", [0.5, 3.0])
@pytest.mark.parametrize(("num_sequences", "curve"), [(16, "measured 16"), (64, "linear")])
@pytest.mark.parametrize("mix", MIXES)
def test_many_sequences_are_hardly_slower_than_without_drafts(mix, num_sequences, curve, forward_ms):
    """The rest of the time goes to trials, and at first to one call that shows what a call costs."""
    seconds = forward_ms / 1000.0
    lookup = (LOOKUP, {"row_seconds": 2.4e-6, "read_seconds": 5e-8})
    head = (HEAD, {"forward_seconds": seconds, "row_seconds": seconds / 40, "read_seconds": seconds / 40})
    batch = SourcesBatch(mix, curve, num_sequences, sources=[lookup, head], length=128)
    for local in batch.gatherer._local:
        if local.source == HEAD:
            local._unread.clear()  # a head reads features, which come with the KV
    plain = num_sequences / CURVES[curve](num_sequences)
    assert batch.rate(100) > 0.985 * plain
    assert batch.rate(400) > 0.994 * plain
