"""The host gap that the benchmark measures lies within a step and covers every sequence."""

from __future__ import annotations

from benchmarks.host_gap import measure


def test_the_gap_is_a_part_of_the_step():
    gap, step = measure(3, context=20, num_steps=5)
    assert 0 < gap < step
