"""A node's reports on its current step, by which others distinguish a long step from a dead node."""

from __future__ import annotations

import pytest

from outrider.engine.step_progress import FIRST_STEP_SECONDS, StepProgress
from outrider.node import NodeReport, NodeState
from outrider.service.liveness import ProgressDeadline
from tests.support.fake_clock import FakeClock


class Watched:
    """The progress of a node, its clock, and a watcher in another process."""

    def __init__(self):
        self.clock = FakeClock()
        self.progress, self.watcher = StepProgress(self.clock), ProgressDeadline(clock=self.clock)

    def begin(self, num_rows):
        self.progress.begin()
        self.progress.expect(num_rows)

    def run_step(self, *, num_rows, seconds):
        self.begin(num_rows)
        self.clock.advance(seconds)
        self.progress.end()

    def expected_seconds(self, num_rows):
        self.begin(num_rows)
        return self.progress.current_step.expected_seconds

    def report(self):
        current_step = self.progress.current_step
        report = NodeReport(
            state=NodeState.SERVING,
            incarnation=bytes(16),
            mark=current_step.mark,
            expected_step_seconds=current_step.expected_seconds,
            step_age_seconds=self.progress.age_seconds(),
        )
        self.watcher.feed(report)


@pytest.fixture
def node():
    return Watched()


def test_a_step_is_expected_to_take_as_long_as_those_of_about_as_many_rows(node):
    node.run_step(num_rows=4, seconds=0.5)
    assert node.expected_seconds(5) == 0.5
    node.progress.end()
    assert node.progress.current_step.expected_seconds == 0.0


def test_a_step_of_another_number_of_rows_than_ever_is_expected_to_take_as_long_for_each_row(node):
    assert node.expected_seconds(512) == FIRST_STEP_SECONDS
    node.clock.advance(0.5)
    node.progress.end()
    assert node.expected_seconds(4096) == 8 * 0.5
    node.progress.end()
    assert node.expected_seconds(1) == FIRST_STEP_SECONDS  # the first step of few rows may be slow to begin


def test_a_step_in_which_the_process_was_frozen_says_little_about_the_next(node):
    node.run_step(num_rows=1, seconds=0.5)
    node.run_step(num_rows=1, seconds=1000.0)
    assert node.expected_seconds(1) < 1.0
    assert node.progress.age_seconds() == 0.0


def test_a_long_first_chunk_on_a_busy_machine_is_not_a_death(node):
    node.begin(256)
    for _ in range(50):  # ten seconds
        node.clock.advance(0.2)
        node.report()
        assert not node.watcher.is_lost()


def test_a_pause_is_no_part_of_a_step(node):
    node.begin(4)
    node.clock.advance(0.25)
    with node.progress.paused():
        assert (node.progress.current_step.expected_seconds, node.progress.age_seconds()) == (0.0, 0.0)
        node.clock.advance(100.0)
    assert node.progress.age_seconds() == 0.25
    assert node.progress.current_step.expected_seconds == FIRST_STEP_SECONDS
    node.clock.advance(0.5)
    assert node.progress.age_seconds() == 0.75
    node.progress.end()
    assert node.expected_seconds(4) == 0.75


def test_a_step_that_others_hold_up_for_long_is_no_death(node):
    for _ in range(3):
        node.run_step(num_rows=4, seconds=0.1)
    node.begin(4)
    for _ in range(10):
        with node.progress.paused():
            for _ in range(4):
                node.clock.advance(0.5)
                node.report()
        node.report()
        node.clock.advance(0.05)
        assert not node.watcher.is_lost()


def test_what_comes_before_the_rows_are_known_is_a_part_of_the_step(node):
    node.run_step(num_rows=4, seconds=0.1)
    node.progress.begin()
    assert node.progress.current_step.expected_seconds == 0.1  # as long as the last step took
    for _ in range(20):
        node.clock.advance(0.5)
        node.report()
    assert node.watcher.is_lost()


def test_a_step_without_rows_says_nothing_about_others(node):
    node.run_step(num_rows=4, seconds=0.1)
    node.progress.begin()
    node.clock.advance(5.0)
    node.progress.end()
    assert node.expected_seconds(4) == 0.1


def test_a_long_step_that_was_expected_to_be_short_before_its_rows_were_known_is_not_late(node):
    node.run_step(num_rows=512, seconds=5.0)
    node.run_step(num_rows=1, seconds=0.01)
    node.progress.begin()
    node.report()  # at this moment
    node.progress.expect(512)
    for _ in range(25):
        node.clock.advance(0.2)
        node.report()
        assert not node.watcher.is_late()


def test_only_forward_passes_are_steps_and_yet_everything_moves_the_mark(node):
    marks = {node.progress.current_step.mark}
    for _ in range(3):  # the node looks for work, and finds none
        node.progress.begin()
        marks.add(node.progress.current_step.mark)
        with node.progress.paused():
            pass
        marks.add(node.progress.current_step.mark)
        node.progress.end()
    assert (node.progress.num_steps, len(marks)) == (0, 7)
    node.run_step(num_rows=3, seconds=0.1)
    assert node.progress.num_steps == 1
