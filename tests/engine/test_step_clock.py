from __future__ import annotations

import itertools

from outrider.engine.step_clock import StepClock
from outrider.profile import Part


def clock_of(*readings):
    return StepClock(iter(readings).__next__)


def test_parts_add_up_to_the_time_that_has_passed():
    clock = clock_of(1000, 1005, 1075, 1084, 1114)
    parts = (Part.SCHEDULE, Part.FORWARD, Part.HAND_OFF, Part.FORWARD)
    assert [clock.mark(part) for part in parts] == [5, 70, 9, 30]
    assert clock.take() == {"schedule": 5, "forward": 100, "hand_off": 9}
    assert clock.take() == {}


def test_what_a_callee_has_measured_moves_but_never_more_than_there_is():
    clock = StepClock(itertools.count(0, 10).__next__)
    clock.mark(Part.DRAFTING)
    clock.move(4, source=Part.DRAFTING, target=Part.DRAFT_WAIT)
    clock.move(99, source=Part.DRAFTING, target=Part.DRAFT_WAIT)
    assert clock.take() == {"drafting": 0, "draft_wait": 10}


def test_a_restart_forgets_what_has_passed():
    clock = clock_of(0, 7, 107, 110)
    clock.mark(Part.IDLE)
    clock.restart()
    clock.mark(Part.EMIT)
    assert clock.take() == {"emit": 3}
