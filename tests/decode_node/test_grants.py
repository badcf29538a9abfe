"""What a decode node grants, rejects, and frees when requests, sessions or the node end."""

from __future__ import annotations

import pytest

from decode_node.commands import DrainExpired, DrainStarted, SessionEnded
from outrider.session import (
    Granted,
    Rejected,
    RejectReason,
    SampleStart,
    SequenceGroupFailed,
)

pytestmark = pytest.mark.usefixtures("steps_take_a_set_time")


def test_a_long_prompt_is_granted_a_transfer_and_cancelling_frees_it(make_node):
    node = make_node()
    group_id = node.open(prompt=tuple(range(10, 110)))
    node.iterate()
    (granted,) = node.find(Granted, group_id)
    assert granted.kv_address.startswith("127.0.0.1:")
    assert node.parts.engine.pool.num_free_blocks < 256
    node.cancel(group_id)
    node.run()
    node.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ()}, RejectReason.INVALID),
        ({"prompt": (1, 400)}, RejectReason.INVALID),
        ({"sampling": {"max_tokens": 0}}, RejectReason.INVALID),
        ({"sampling": {"max_tokens": 2048}}, RejectReason.TOO_LARGE),
        ({"sampling": {"n": 65}}, RejectReason.TOO_LARGE),
        ({"sampling": {"n": 2}, "samples": (SampleStart(2),)}, RejectReason.INVALID),
        ({"sampling": {"n": 2}, "samples": (SampleStart(1), SampleStart(0))}, RejectReason.INVALID),
        ({"sampling": {"n": 2}, "samples": (SampleStart(1), SampleStart(1))}, RejectReason.INVALID),
        ({"samples": (SampleStart(0, (400,)),)}, RejectReason.INVALID),
        ({"samples": (SampleStart(0, (1,) * 40),)}, RejectReason.INVALID),
    ],
)
def test_what_can_never_run_is_rejected(make_node, fields, reason):
    node = make_node()
    group_id = node.open(**fields)
    node.run()
    (rejected,) = node.find(Rejected, group_id)
    assert rejected.reason is reason
    node.assert_nothing_is_held()


def test_more_than_max_running_is_no_room_and_nothing_is_kept(make_node):
    node = make_node(max_running_sequences=2)
    groups = [node.open(sampling={"max_tokens": 5}) for _ in range(3)]
    node.run()
    (rejected,) = node.find(Rejected, groups[2])
    assert rejected.reason is RejectReason.NO_ROOM
    assert len(node.tokens(groups[1])) == 5
    node.assert_nothing_is_held()


def test_the_end_of_a_session_frees_its_groups_and_no_other(make_node):
    node = make_node()
    mine = node.open(session=1)
    other = node.open(session=2)
    node.iterate()
    node.submit(SessionEnded(1))
    node.run()
    assert len(node.tokens(other)) == 40
    assert len(node.tokens(mine)) < 5
    node.assert_nothing_is_held()


def test_a_drained_node_takes_nothing_new_and_gives_up_the_rest_at_the_deadline(make_node):
    node = make_node()
    running = node.open()
    node.iterate()
    node.submit(DrainStarted())
    refused = node.open()
    node.submit(DrainExpired())
    node.run()
    assert node.find(Rejected, refused)[0].reason is RejectReason.DRAINING
    assert node.find(SequenceGroupFailed, running)[0].code == 14
    node.assert_nothing_is_held()
