from __future__ import annotations

import asyncio
import time

from outrider.node import NodeReport, NodeState
from outrider.service.liveness import (
    REPORT_SECONDS,
    REPORT_TOLERANCE,
    SILENT_SECONDS,
    STALL_SECONDS,
    STEP_TOLERANCE,
    Liveness,
    ProgressDeadline,
    watch_progress,
)
from tests.support.fake_clock import FakeClock


def report(step: int, *, expected: float = 0.0, age: float = 0.0) -> NodeReport:
    return NodeReport(
        state=NodeState.SERVING, incarnation=b"i" * 16, mark=step, expected_step_seconds=expected, step_age_seconds=age
    )


def make_deadline() -> tuple[ProgressDeadline, FakeClock]:
    clock = FakeClock(100.0)
    return ProgressDeadline(grace_seconds=2.0, clock=clock), clock


def test_silence_past_the_grace_is_a_loss():
    deadline, clock = make_deadline()
    deadline.feed(report(1))
    clock.advance(1.9)
    assert not deadline.is_lost()
    clock.advance(0.2)
    assert deadline.is_lost()


def test_a_node_is_silent_when_its_reports_are_overdue_and_not_by_a_long_step():
    deadline, clock = make_deadline()
    for age in range(10):
        deadline.feed(report(1, expected=0.1, age=0.5 * age))
        clock.advance(0.1)
    assert deadline.is_late()
    assert deadline.standing is Liveness.LATE
    clock.advance(REPORT_SECONDS + SILENT_SECONDS + 0.09)
    assert not deadline.advance()
    clock.advance(0.02)
    assert deadline.advance()
    assert deadline.standing is Liveness.SILENT
    assert not deadline.is_lost()


def test_after_a_stall_of_this_process_a_late_node_is_not_silent_at_once():
    deadline, clock = make_deadline()
    deadline.feed(report(1))
    clock.advance(1.9)  # enough for the node to be late and silent, but reports may still be unread
    assert deadline.advance()
    assert deadline.standing is Liveness.LATE
    assert not deadline.advance()


def test_an_idle_node_lives_as_long_as_it_reports():
    deadline, clock = make_deadline()
    for _ in range(100):
        deadline.feed(report(7))
        clock.advance(0.2)
        assert not deadline.is_lost()


def test_a_long_step_is_no_loss_but_one_that_never_ends_is():
    deadline, clock = make_deadline()
    deadline.feed(report(7))
    alive_seconds = 0.0
    for tick in range(200):
        deadline.feed(report(7, expected=1.0, age=tick * 0.2))
        if deadline.is_lost():
            break
        alive_seconds = tick * 0.2
        clock.advance(0.2)
    assert STEP_TOLERANCE < alive_seconds < STEP_TOLERANCE + 3.0, "the tolerance, and a grace of 2 s"


def test_without_reports_a_long_step_is_waited_for_less_long():
    deadline, clock = make_deadline()
    deadline.feed(report(7, expected=0.3))
    clock.advance(2.0 + REPORT_TOLERANCE * 0.3 - 0.1)
    assert not deadline.is_lost()
    clock.advance(0.2)
    assert deadline.is_lost()


def test_steps_that_move_keep_a_busy_node_alive():
    deadline, clock = make_deadline()
    for step in range(100):
        deadline.feed(report(step, expected=0.05, age=0.01))
        clock.advance(1.0)
        assert not deadline.is_lost()


def test_the_grace_is_at_least_a_second():
    clock = FakeClock()
    deadline = ProgressDeadline(grace_seconds=0.0, clock=clock)
    clock.advance(0.9)
    assert not deadline.is_lost()


async def test_a_loop_that_always_lags_declares_losses_all_the_same():
    async def lag():
        while True:
            time.sleep(1.5 * STALL_SECONDS)  # noqa: ASYNC251 the lag
            await asyncio.sleep(0)

    deadline, clock = make_deadline()
    clock.advance(10.0)
    lagging = asyncio.create_task(lag())
    async with asyncio.timeout(30.0):
        await watch_progress(deadline, lambda: None)
    lagging.cancel()
    assert deadline.standing is Liveness.LOST


async def test_the_watch_tells_of_each_change_until_the_loss():
    deadline, clock = make_deadline()
    deadline.feed(report(1, expected=0.5))
    told = []

    def tell():
        told.append(deadline.standing)
        clock.advance(deadline.next_change()[1])

    clock.advance(deadline.next_change()[1])
    async with asyncio.timeout(30.0):
        await watch_progress(deadline, tell)
    assert told == [Liveness.LATE, Liveness.SILENT]


async def test_a_report_that_brings_the_deadline_nearer_is_heeded_at_once():
    deadline = ProgressDeadline(grace_seconds=3600.0)
    late = asyncio.Event()
    watching = asyncio.create_task(watch_progress(deadline, late.set))
    await asyncio.sleep(0)
    deadline.feed(report(1, expected=0.001))
    async with asyncio.timeout(30.0):
        await late.wait()
    assert deadline.standing is Liveness.LATE
    watching.cancel()
