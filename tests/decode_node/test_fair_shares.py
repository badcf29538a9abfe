"""Fair shares: a router that waits for room gets it before another one takes more than its share."""

from __future__ import annotations

import pytest

from decode_node.admission import CLAIM_SECONDS, HOLD_BACK_SECONDS
from decode_node.commands import SessionEnded
from outrider.session import Granted, Rejected, RejectReason

GREEDY, MODEST, THIRD = 1, 2, 3
MAX_RUNNING = 16  # sequences on the scripted node
SAMPLING = {"max_tokens": 40}


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node(num_blocks=400)


def answer(node, *, session, n=1):
    """Opens a group. Returns its id and the node's answer."""
    group_id = node.open(session=session, sampling={**SAMPLING, "n": n})
    for _ in range(2):  # a cancel may have to wait for the device
        node.iterate()
        said = [*node.find(Granted, group_id), *node.find(Rejected, group_id)]
        if said:
            break
    return group_id, *said


def fill(node, *, session, num_groups=MAX_RUNNING):
    """Opens groups of one sample each, checks that all are granted, and returns their ids."""
    opened = [answer(node, session=session) for _ in range(num_groups)]
    assert all(isinstance(said, Granted) for _, said in opened)
    return [group_id for group_id, _ in opened]


def test_while_another_waits_a_router_with_its_share_is_refused(node):
    groups = fill(node, session=GREEDY)
    _, refused = answer(node, session=MODEST)
    assert (refused.reason, refused.num_sequences_needed, refused.wait_seconds) == (RejectReason.NO_ROOM, 1, 0.0)
    node.cancel(groups.pop(), session=GREEDY)
    _, held_back = answer(node, session=GREEDY)
    assert (held_back.reason, held_back.wait_seconds) == (RejectReason.NO_ROOM, HOLD_BACK_SECONDS)
    _, granted = answer(node, session=MODEST)
    assert isinstance(granted, Granted)
    node.cancel(groups.pop(), session=GREEDY)
    _, granted = answer(node, session=GREEDY)  # nobody is waiting any longer
    assert isinstance(granted, Granted)


def test_a_router_below_its_share_comes_in_while_another_waits(node):
    fill(node, session=GREEDY, num_groups=7)  # with two routers, a share is 8
    _, refused = answer(node, session=MODEST, n=10)
    assert isinstance(refused, Rejected)
    assert isinstance(answer(node, session=GREEDY)[1], Granted)
    assert isinstance(answer(node, session=GREEDY)[1], Rejected)


def test_the_share_is_that_of_all_who_hold_or_want_some(node):
    fill(node, session=GREEDY, num_groups=6)
    fill(node, session=THIRD, num_groups=1)
    assert isinstance(answer(node, session=MODEST, n=10)[1], Rejected)
    assert isinstance(answer(node, session=GREEDY)[1], Rejected)  # with three routers, a share is 5
    assert isinstance(answer(node, session=THIRD)[1], Granted)


def test_shares_are_of_blocks_too(make_scripted_node):
    node = make_scripted_node(num_blocks=24)
    node.groups._admission._mean_output_tokens = 1.0
    node.open(prompt=tuple(range(1, 50)), session=GREEDY, sampling=SAMPLING)  # twelve blocks
    node.iterate()
    too_much = node.open(prompt=tuple(range(1, 46))[::-1], session=MODEST, sampling=SAMPLING)
    node.iterate()
    (refused,) = node.find(Rejected, too_much)
    assert refused.kv_blocks_needed > node.engine.pool.num_free_blocks
    assert refused.kv_blocks_needed <= node.engine.pool.num_blocks
    assert isinstance(answer(node, session=GREEDY)[1], Rejected)
    assert isinstance(answer(node, session=THIRD)[1], Granted)


@pytest.mark.parametrize("end", ["time", "session"])
def test_a_claim_ends_with_its_time_and_with_its_session(node, end):
    groups = fill(node, session=GREEDY)
    for _ in range(20):
        assert isinstance(answer(node, session=MODEST)[1], Rejected)
    assert len(node.groups._fair_shares._claims) == 1  # one claim for each session
    node.cancel(groups.pop(), session=GREEDY)
    if end == "time":
        node.clock.advance(CLAIM_SECONDS)
    else:
        node.loop.submit(SessionEnded(MODEST))
    assert isinstance(answer(node, session=GREEDY)[1], Granted)
    assert not node.groups._fair_shares._claims


def test_a_report_shows_room_when_a_refused_group_would_be_let_in(node):
    groups = fill(node, session=GREEDY)
    _, refused = answer(node, session=MODEST, n=2)
    room = []
    for group_id in groups[:2]:
        room.append(
            node.groups.num_sequences_free >= refused.num_sequences_needed
            and node.engine.pool.num_free_blocks >= refused.kv_blocks_needed
        )
        node.cancel(group_id, session=GREEDY)
        node.iterate()
    assert room == [False, False]
    assert node.groups.num_sequences_free >= refused.num_sequences_needed
    assert isinstance(answer(node, session=MODEST, n=2)[1], Granted)


def test_while_preempted_sequences_wait_there_is_no_room(node):
    fill(node, session=GREEDY, num_groups=2)
    assert node.groups.num_sequences_free == MAX_RUNNING - 2
    pool = node.engine.pool
    held = pool.allocate(pool.num_free_blocks)
    while not node.num_preempted:
        node.iterate()
    assert node.groups.num_sequences_free == 0
    pool.release(held)
    node.run()
    assert node.groups.num_sequences_free == MAX_RUNNING
    node.assert_nothing_is_held()
