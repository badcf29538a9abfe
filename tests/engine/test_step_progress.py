"""What a node says of the step at hand: enough for others to tell a long one from a death."""

from __future__ import annotations

from outrider.engine.fakes import FakeClock
from outrider.engine.step_progress import FIRST_STEP_SECONDS, StepProgress
from outrider.node import NodeReport, NodeState
from outrider.service.liveness import ProgressDeadline


def run_step(progress, clock, *, num_rows, seconds):
    progress.begin(num_rows)
    clock.advance(seconds)
    return progress.end()


def expected_seconds(progress, num_rows):
    progress.begin(num_rows)
    return progress.at_hand.expected_seconds


def test_a_step_is_expected_to_take_as_long_as_those_of_about_as_many_rows():
    clock = FakeClock()
    progress = StepProgress(clock)
    assert run_step(progress, clock, num_rows=4, seconds=0.5) == 0.5
    assert expected_seconds(progress, 5) == 0.5
    progress.end()
    assert progress.at_hand.expected_seconds == 0.0


def test_a_step_of_more_rows_than_ever_is_expected_to_take_as_long_for_each_row():
    clock = FakeClock()
    progress = StepProgress(clock)
    assert expected_seconds(progress, 512) == FIRST_STEP_SECONDS
    clock.advance(0.5)
    progress.end()
    assert expected_seconds(progress, 4096) == 8 * 0.5
    progress.end()


def test_a_step_of_fewer_rows_than_ever_may_still_be_slow_to_begin():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=512, seconds=0.5)
    assert expected_seconds(progress, 1) == FIRST_STEP_SECONDS


def test_a_step_in_which_the_process_was_frozen_says_little_about_the_next():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=1, seconds=0.5)
    run_step(progress, clock, num_rows=1, seconds=1000.0)
    assert expected_seconds(progress, 1) < 1.0
    assert progress.age_seconds() == 0.0


def test_a_long_first_chunk_on_a_busy_machine_is_not_a_death():
    clock = FakeClock()
    progress = StepProgress(clock)
    watcher = ProgressDeadline(clock=clock)
    progress.begin(256)
    for _ in range(50):  # ten seconds
        clock.advance(0.2)
        at_hand = progress.at_hand
        watcher.feed(
            NodeReport(
                state=NodeState.SERVING,
                incarnation=bytes(16),
                step=at_hand.step,
                expected_step_seconds=at_hand.expected_seconds,
                step_age_seconds=progress.age_seconds(),
            )
        )
        assert not watcher.is_lost()
