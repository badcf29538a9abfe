"""The progress of long work in outputs that cannot be redrawn, such as a container's log."""

from __future__ import annotations

import io

import pytest

from outrider.cluster import event_printer
from outrider.cluster.child import ClusterEvent, EventKind
from outrider.cluster.event_printer import EventPrinter

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(event_printer.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_log_gets_the_beginning_the_end_and_a_line_every_two_seconds(clock):
    log = io.StringIO()
    printer = EventPrinter(log)
    for second in range(6):
        clock.now = 100.0 + second
        printer.show(
            ClusterEvent(kind=EventKind.PROGRESS, name="model", message="download", done=second * MIB, total=5 * MIB)
        )
    assert log.getvalue().splitlines() == [
        "model      download …",
        "model      download 2.0/5.0 MiB, 2 s …",
        "model      download 4.0/5.0 MiB, 4 s …",
        "model      download 5.0/5.0 MiB in 5 s",
    ]


def test_a_stage_whose_figures_stay_says_for_how_long_and_seldom(clock):
    log = io.StringIO()
    printer = EventPrinter(log)
    for second in range(25):
        clock.now = 100.0 + second
        printer.show(ClusterEvent(kind=EventKind.PROGRESS, name="model", message="convert", done=second // 24, total=3))
    assert log.getvalue().splitlines() == [
        "model      convert …",
        "model      convert 0/3, 10 s …",
        "model      convert 0/3, 20 s …",
        "model      convert 1/3, 24 s …",
    ]


def test_a_failed_start_is_told_by_whoever_waits_for_it():
    log = io.StringIO()
    EventPrinter(log).show(ClusterEvent(kind=EventKind.FAILED, name="model", message="model ended with status 1"))
    assert log.getvalue() == ""
