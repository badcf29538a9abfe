"""What a node says of the step at hand: enough for others to tell a long one from a death."""

from __future__ import annotations

from outrider.engine.fakes import FakeClock
from outrider.engine.step_progress import FIRST_STEP_SECONDS, StepProgress
from outrider.node import NodeReport, NodeState
from outrider.service.liveness import ProgressDeadline


def run_step(progress, clock, *, num_rows, seconds):
    progress.begin()
    progress.expect(num_rows)
    clock.advance(seconds)
    progress.end()


def expected_seconds(progress, num_rows):
    progress.begin()
    progress.expect(num_rows)
    return progress.at_hand.expected_seconds


def report_of(progress):
    at_hand = progress.at_hand
    return NodeReport(
        state=NodeState.SERVING,
        incarnation=bytes(16),
        step=at_hand.step,
        expected_step_seconds=at_hand.expected_seconds,
        step_age_seconds=progress.age_seconds(),
    )


def test_a_step_is_expected_to_take_as_long_as_those_of_about_as_many_rows():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=4, seconds=0.5)
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
    progress.begin()
    progress.expect(256)
    for _ in range(50):  # ten seconds
        clock.advance(0.2)
        watcher.feed(report_of(progress))
        assert not watcher.is_lost()


def test_a_pause_is_no_part_of_a_step():
    clock = FakeClock()
    progress = StepProgress(clock)
    progress.begin()
    progress.expect(4)
    clock.advance(0.25)
    progress.pause()
    assert (progress.at_hand.expected_seconds, progress.age_seconds()) == (0.0, 0.0)
    clock.advance(100.0)
    progress.resume()
    assert progress.age_seconds() == 0.25
    assert progress.at_hand.expected_seconds == FIRST_STEP_SECONDS
    clock.advance(0.5)
    assert progress.age_seconds() == 0.75
    progress.end()
    assert expected_seconds(progress, 4) == 0.75


def test_a_pause_ends_with_what_happens_in_it():
    clock = FakeClock()
    progress = StepProgress(clock)
    progress.begin()
    progress.expect(4)
    with progress.paused():
        clock.advance(100.0)
        assert progress.at_hand.expected_seconds == 0.0
    clock.advance(0.5)
    progress.end()
    assert expected_seconds(progress, 4) == 0.5


def test_a_step_that_others_hold_up_for_long_is_no_death():
    clock = FakeClock()
    progress, watcher = StepProgress(clock), ProgressDeadline(clock=clock)
    for _ in range(3):
        run_step(progress, clock, num_rows=4, seconds=0.1)
    progress.begin()
    progress.expect(4)
    for _ in range(10):
        progress.pause()
        for _ in range(4):
            clock.advance(0.5)
            watcher.feed(report_of(progress))
        progress.resume()
        watcher.feed(report_of(progress))
        clock.advance(0.05)
        assert not watcher.is_lost()


def test_what_comes_before_the_rows_are_known_is_a_part_of_the_step():
    clock = FakeClock()
    progress, watcher = StepProgress(clock), ProgressDeadline(clock=clock)
    run_step(progress, clock, num_rows=4, seconds=0.1)
    progress.begin()
    assert progress.at_hand.expected_seconds == 0.1  # as the last one
    for _ in range(20):
        clock.advance(0.5)
        watcher.feed(report_of(progress))
    assert watcher.is_lost()


def test_a_step_without_rows_says_nothing_about_others():
    clock = FakeClock()
    progress = StepProgress(clock)
    run_step(progress, clock, num_rows=4, seconds=0.1)
    progress.begin()
    clock.advance(5.0)
    progress.end()
    assert expected_seconds(progress, 4) == 0.1


def test_a_long_step_that_was_expected_to_be_short_before_its_rows_were_known_is_not_late():
    clock = FakeClock()
    progress, watcher = StepProgress(clock), ProgressDeadline(clock=clock)
    run_step(progress, clock, num_rows=512, seconds=5.0)
    run_step(progress, clock, num_rows=1, seconds=0.01)
    progress.begin()
    watcher.feed(report_of(progress))  # just then
    progress.expect(512)
    for _ in range(25):
        clock.advance(0.2)
        watcher.feed(report_of(progress))
        assert not watcher.is_late()
