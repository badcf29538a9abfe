from __future__ import annotations

import itertools

from outrider.engine.step_clock import StepClock
from outrider.profile import Part


class Nanoseconds:
    def __init__(self):
        self.now = 1000

    def __call__(self):
        return self.now


def test_parts_add_up_to_the_time_that_has_passed():
    now = Nanoseconds()
    clock = StepClock(now)
    for part, spent in ((Part.SCHEDULE, 5), (Part.FORWARD, 70), (Part.HAND_OFF, 9), (Part.FORWARD, 30)):
        now.now += spent
        assert clock.mark(part) == spent
    assert clock.take() == {"schedule": 5, "forward": 100, "hand_off": 9}
    assert clock.take() == {}


def test_what_a_callee_has_measured_moves_but_never_more_than_there_is():
    clock = StepClock(itertools.count(0, 10).__next__)
    clock.mark(Part.DRAFTING)
    clock.move(4, source=Part.DRAFTING, target=Part.DRAFT_WAIT)
    clock.move(99, source=Part.DRAFTING, target=Part.DRAFT_WAIT)
    assert clock.take() == {"drafting": 0, "draft_wait": 10}


def test_a_restart_forgets_what_has_passed():
    now = Nanoseconds()
    clock = StepClock(now)
    now.now += 7
    clock.mark(Part.IDLE)
    now.now += 100
    clock.restart()
    now.now += 3
    clock.mark(Part.EMIT)
    assert clock.take() == {"emit": 3}
