"""The queue of commands to the engine thread, while routers send commands faster than the thread takes them."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace

import pytest

from decode_node.commands import (
    DrainStarted,
    RouterCommand,
    SessionEnded,
    TransferFailed,
)
from decode_node.inbox import COMMAND_WORK, MAX_WORK, Inbox
from outrider.request import RequestOptions, SamplingParams
from outrider.session import CancelSequenceGroup, Granted, OpenSequenceGroup, RetargetSequenceGroup, SampleStart

PATIENCE_SECONDS = 30.0
GONE = bytes([1] * 16)
"""The id of a group that is not in the inbox."""


def opened(session_id: int, num_tokens: int = 1, *, group_id: bytes = bytes(16)) -> RouterCommand:
    group = OpenSequenceGroup(
        sequence_group_id=group_id,
        transfer_id=bytes(16),
        request_id="r",
        prompt_token_ids=(1,) * (num_tokens - num_tokens // 2),
        samples=(SampleStart(0, (1,) * (num_tokens // 2)),),
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=1)),
    )
    return RouterCommand(session_id, group, "127.0.0.1")


def cancelled(session_id: int, *samples: int, group_id: bytes = GONE) -> RouterCommand:
    return RouterCommand(session_id, CancelSequenceGroup(sequence_group_id=group_id, samples=samples))


def test_routers_take_turns():
    inbox = Inbox()
    flood = [opened(1) for _ in range(3)]
    other = [opened(2), cancelled(2)]
    for command in (*flood, *other):
        inbox.put(command)
    assert inbox.take_batch() == [flood[0], other[0], flood[1], other[1], flood[2]]


def test_what_the_node_says_to_itself_comes_first_and_is_never_left():
    inbox = Inbox()
    for _ in range(MAX_WORK // COMMAND_WORK):
        inbox.put(cancelled(1))
    own = [TransferFailed(bytes(16), "gone") for _ in range(MAX_WORK)] + [DrainStarted()]
    for command in own:
        inbox.put(command)
    assert inbox.take_batch() == [*own, *[cancelled(1)] * (MAX_WORK // COMMAND_WORK)]


def test_a_session_that_ends_takes_its_commands_along():
    inbox = Inbox()
    for command in (opened(1), opened(2), SessionEnded(1)):
        inbox.put(command)
    assert inbox.take_batch() == [SessionEnded(1), opened(2)]


def test_a_step_waits_for_one_long_prompt_at_a_time():
    inbox = Inbox()
    longs = [opened(1, num_tokens=MAX_WORK), opened(1, num_tokens=MAX_WORK)]
    for command in longs:
        inbox.put(command)
    assert [inbox.take_batch(), inbox.take_batch()] == [[longs[0]], [longs[1]]]


def test_a_group_that_is_given_up_before_it_is_opened_is_not_opened():
    inbox = Inbox()
    ids = [bytes([number] * 16) for number in range(4)]
    flood = [opened(1, group_id=ids[2]), cancelled(1, group_id=ids[2])]
    kept = [opened(1, group_id=ids[3]), cancelled(1, 0, group_id=ids[3])]  # cancels only one of the samples
    others = [opened(2, group_id=ids[2])]  # the same id from another router is another group
    for command in (*flood, *kept, *others):
        inbox.put(command)
    assert inbox.take_batch() == [flood[1], others[0], *kept]
    inbox.put(flood[0])  # the cancel has been taken and does not affect later groups
    assert inbox.take_batch() == [flood[0]]


def test_beside_a_flood_a_step_goes_on_and_other_routers_are_heard(make_scripted_node):
    node = make_scripted_node()
    running = node.open(sampling={"max_tokens": 5})
    node.iterate()
    for _ in range(1000):
        node.cancel(GONE, session=2)
    other = node.open(session=3)
    node.iterate()
    node.loop._report()  # otherwise a device's last step is reported with the next one
    assert len(node.tokens(running)) == 2
    assert node.find(Granted, other)
    assert not node.loop._inbox.is_empty
    node.run()


ONE, TWO = bytes([1] * 16), bytes([2] * 16)
RETARGET = RouterCommand(1, RetargetSequenceGroup(sequence_group_id=bytes(16), transfer_id=ONE))


def test_others_do_not_wait_while_a_groups_constraint_is_compiled():
    inbox, compiled = Inbox(), Future()
    waiting, other = opened(1, group_id=ONE), opened(1, group_id=TWO)
    inbox.put_when_compiled(waiting, compiled)
    assert inbox.is_empty
    inbox.put(other)
    inbox.put(cancelled(1, group_id=TWO))
    assert inbox.take_batch() == [cancelled(1, group_id=TWO)]
    compiled.set_result(None)
    inbox.wait(PATIENCE_SECONDS)
    assert inbox.take_batch() == [waiting]


def test_what_is_given_up_before_its_constraint_is_compiled_is_not_opened():
    inbox, compiled = Inbox(), Future()
    kept, given_up, elsewhere = opened(1, group_id=TWO), opened(1, group_id=ONE), opened(2, group_id=ONE)
    for command in (kept, given_up, elsewhere):
        inbox.put_when_compiled(command, compiled)
    inbox.put(cancelled(1, group_id=ONE))
    inbox.put(cancelled(1, 0, group_id=TWO))  # cancels only one of the samples
    assert inbox.take_batch() == []
    compiled.set_exception(ValueError("a constraint that cannot be compiled is opened, and refused there"))
    assert inbox.take_batch() == [kept, elsewhere, cancelled(1, 0, group_id=TWO)]
    inbox.put(cancelled(1, group_id=ONE))
    assert inbox.take_batch() == [cancelled(1, group_id=ONE)]


def test_nothing_is_opened_after_the_end_of_its_session():
    inbox, compiled = Inbox(), Future()
    inbox.put_when_compiled(opened(1), compiled)
    inbox.put_when_compiled(opened(2), compiled)
    inbox.put(SessionEnded(1))
    compiled.set_result(None)
    assert inbox.take_batch() == [SessionEnded(1), opened(2)]


def test_what_is_said_of_a_group_that_is_not_opened_yet_comes_after_it():
    inbox, compiled = Inbox(), Future()
    inbox.put_when_compiled(opened(1), compiled)
    commands = [RETARGET, cancelled(1, 0, group_id=bytes(16)), opened(1)]  # the same id again, no constraint
    for command in commands:
        inbox.put(command)
    assert inbox.take_batch() == []
    compiled.set_result(None)
    assert inbox.take_batch() == [opened(1), *commands]


def test_a_name_that_is_used_twice_waits_for_each_of_its_constraints():
    """The first group may be refused. The engine thread never waits for a constraint."""
    inbox, compiled, other = Inbox(), Future(), Future()
    again = replace(opened(1), compiled=other)
    inbox.put_when_compiled(opened(1), compiled)
    inbox.put_when_compiled(again, other)
    inbox.put(RETARGET)
    compiled.set_exception(ValueError("it cannot be compiled"))
    assert inbox.take_batch() == [opened(1)]
    other.set_result(None)
    assert inbox.take_batch() == [again, RETARGET]


@pytest.mark.parametrize("is_given_up", [False, True], ids=["opened", "given up"])
def test_a_compiled_constraint_is_freed_with_the_last_that_follows_it(is_given_up):
    """Otherwise its states, up to 40 MB, would stay until a garbage collection, and a service rarely has one."""
    inbox, compiled = Inbox(), Future()
    inbox.put_when_compiled(replace(opened(1, group_id=ONE), compiled=compiled), compiled)
    if is_given_up:
        inbox.put(cancelled(1, group_id=ONE))
    compiled.set_result(None)
    inbox.take_batch()
    gc.disable()
    try:
        left = weakref.ref(compiled)
        del compiled
        assert left() is None
    finally:
        gc.enable()


def test_a_group_that_is_opened_again_waits_for_its_own_constraint():
    inbox, given_up, compiled = Inbox(), Future(), Future()
    inbox.put_when_compiled(opened(1, group_id=ONE), given_up)
    inbox.put(cancelled(1, group_id=ONE))
    inbox.put_when_compiled(opened(1, group_id=ONE), compiled)
    given_up.set_result(None)
    assert inbox.take_batch() == []
    compiled.set_result(None)
    assert inbox.take_batch() == [opened(1, group_id=ONE)]


@pytest.mark.parametrize("bounds", [{"max_commands": 3}, {"max_tokens": 3}], ids=["commands", "tokens"])
def test_groups_whose_constraints_are_compiled_count_for_a_routers_room(bounds):
    inbox, compiled = Inbox(**bounds), Future()
    for number in range(3):
        assert inbox.has_room(1)
        inbox.put_when_compiled(opened(1, group_id=bytes([number] * 16)), compiled)
    assert not inbox.has_room(1)
    assert inbox.has_room(2)
    compiled.set_result(None)
    inbox.take_batch()
    assert inbox.has_room(1)
