"""The timed parts of a call: their order, number and acknowledgements."""

from __future__ import annotations

import threading

from outrider.prefill import MAX_TIMED_PARTS, TimedPart
from prefill_node.pushed_parts import PushedParts, add_part


def test_what_there_is_no_room_for_is_added_to_the_last_part():
    parts: list[TimedPart] = []
    for number in range(MAX_TIMED_PARTS + 3):
        add_part(parts, TimedPart(float(number), number + 0.5, 10))
    last = MAX_TIMED_PARTS - 1
    assert len(parts) == MAX_TIMED_PARTS
    assert parts[last] == TimedPart(last, last + 3.5, 40)
    assert parts[last - 1] == TimedPart(last - 1, last - 0.5, 10)


def test_a_part_ends_when_its_last_frame_is_acknowledged():
    pushed = PushedParts()
    pushed.add(1.0, 10, last_frame=2)
    pushed.add(2.0, 20, last_frame=3)
    pushed.acknowledge(1)
    pushed.acknowledge(2)
    first, second = pushed.settle(0.5)
    assert first.end_seconds > 2.0, "monotonic time"
    assert (first.start_seconds, first.amount) == (1.0, 10)
    assert second == TimedPart(2.0, 0.5, 20), "acknowledged by the answer to the commit"


def test_an_acknowledgement_may_come_before_its_part_has_been_added():
    pushed = PushedParts()
    pushed.acknowledge(4)
    pushed.add(1.0, 10, last_frame=4)
    (part,) = pushed.settle(0.0)
    assert part.end_seconds > 1.0


def test_acknowledgements_of_another_thread_end_every_part():
    pushed, num_parts = PushedParts(), MAX_TIMED_PARTS + 50
    thread = threading.Thread(target=lambda: [pushed.acknowledge(frame) for frame in range(1, num_parts + 1)])
    thread.start()
    for frame in range(1, num_parts + 1):
        pushed.add(0.5, 1, last_frame=frame)
    thread.join(30)
    parts = pushed.settle(0.0)
    assert len(parts) == MAX_TIMED_PARTS
    assert sum(part.amount for part in parts) == num_parts
    assert all(part.end_seconds > part.start_seconds for part in parts)
