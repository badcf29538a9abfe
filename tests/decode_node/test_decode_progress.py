"""What a decode node says of the step at hand."""

from __future__ import annotations

from decode_node.statistics import FIRST_STEP_SECONDS, StepProgress
from outrider.engine.fakes import FakeClock


def run_step(progress, clock, *, num_rows, seconds):
    progress.begin(num_rows)
    clock.advance(seconds)
    progress.end()


def test_a_step_is_expected_to_take_as_long_as_those_of_about_as_many_rows():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=4, seconds=0.5)
    progress.begin(5)
    assert progress.at_hand.expected_seconds == 0.5
    progress.end()
    progress.begin(512)
    assert progress.at_hand.expected_seconds == FIRST_STEP_SECONDS


def test_a_step_in_which_the_process_was_frozen_says_little_about_the_next():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=1, seconds=0.5)
    run_step(progress, clock, num_rows=1, seconds=1000.0)
    progress.begin(1)
    assert progress.at_hand.expected_seconds < 1.0
    assert progress.age_seconds() == 0.0
