"""How long work is told where nothing can be redrawn, as in a container's log."""

from __future__ import annotations

import io

import pytest

from outrider.cluster import ClusterEvent, EventKind, event_printer
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
        "model      download 2.0/5.0 MiB …",
        "model      download 4.0/5.0 MiB …",
        "model      download 5.0/5.0 MiB",
    ]
