"""What a prefill node says of the step at hand: enough for others to tell a long one from a death."""

from __future__ import annotations

from outrider.engine.fakes import FakeClock
from outrider.node import NodeReport, NodeState
from outrider.service.liveness import ProgressDeadline
from prefill_node.statistics import Progress


def report_of(progress):
    at_hand = progress.step_at_hand()
    return NodeReport(
        state=NodeState.SERVING,
        incarnation=bytes(16),
        step=at_hand.step,
        expected_step_seconds=at_hand.expected_seconds,
        step_age_seconds=at_hand.age_seconds,
    )


def test_a_long_first_chunk_on_a_busy_machine_is_not_a_death():
    clock = FakeClock()
    progress = Progress(clock=clock)
    watcher = ProgressDeadline(clock=clock)
    progress.begin_step(256)
    for _ in range(50):  # ten seconds
        clock.advance(0.2)
        watcher.feed(report_of(progress))
        assert not watcher.is_lost()


def test_a_step_is_expected_to_take_as_long_for_each_row_as_those_before():
    clock = FakeClock()
    progress = Progress(clock=clock)
    progress.begin_step(100)
    clock.advance(2.0)
    assert progress.end_step(100) == 2.0
    progress.begin_step(50)
    assert progress.step_at_hand().expected_seconds == 1.0
    progress.end_step(50)
    assert progress.step_at_hand().expected_seconds == 0.0


def test_a_step_in_which_the_process_was_frozen_says_little_about_the_next():
    clock = FakeClock()
    progress = Progress(clock=clock)
    for seconds in (1.0, 1000.0):
        progress.begin_step(10)
        clock.advance(seconds)
        progress.end_step(10)
    progress.begin_step(10)
    assert progress.step_at_hand().expected_seconds < 2.0
