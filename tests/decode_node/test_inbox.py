"""Commands of routers that write faster than the engine thread takes."""

from __future__ import annotations

import queue

import pytest

from decode_node.commands import DrainStarted, GroupCancelled, GroupOpened, SessionEnded, TransferFailed
from decode_node.inbox import TOO_MANY_TOKENS, Inbox
from outrider.errors import CapacityError
from outrider.request import SamplingParams
from outrider.session import CancelSequenceGroup, OpenSequenceGroup, SampleStart


def opened(session_id: int, num_tokens: int = 1) -> GroupOpened:
    group = OpenSequenceGroup(
        sequence_group_id=bytes(16),
        transfer_id=bytes(16),
        request_id="r",
        prompt_token_ids=(1,) * (num_tokens - num_tokens // 2),
        samples=(SampleStart(0, (1,) * (num_tokens // 2)),),
        sampling=SamplingParams(seed=0, max_tokens=1),
    )
    return GroupOpened(session_id, group, "127.0.0.1")


def cancelled(session_id: int) -> GroupCancelled:
    return GroupCancelled(session_id, CancelSequenceGroup(sequence_group_id=bytes(16)))


def test_commands_come_out_in_their_order():
    inbox = Inbox()
    commands = [opened(1), cancelled(1), DrainStarted(), opened(2)]
    for command in commands:
        inbox.put(command)
    assert inbox.get(0.01) is commands[0]
    assert inbox.take_all() == commands[1:]
    with pytest.raises(queue.Empty):
        inbox.get(0.001)


@pytest.mark.parametrize("command", [opened(1), cancelled(1)], ids=["open", "cancel"])
def test_a_router_that_floods_is_refused_and_no_other_nor_the_node_itself(command):
    inbox = Inbox(max_commands=3)
    for _ in range(3):
        inbox.put(command)
    with pytest.raises(CapacityError, match="3 commands of this router wait already") as refused:
        inbox.put(command)
    assert refused.value.reason == "TOO_MANY_COMMANDS"
    others = [opened(2), SessionEnded(1), TransferFailed(bytes(16), "gone"), DrainStarted()]
    for other in others:
        inbox.put(other)
    assert inbox.take_all() == [command] * 3 + others


def test_what_the_engine_thread_has_taken_counts_no_more():
    inbox = Inbox(max_commands=1, max_tokens=10)
    for _ in range(5):
        inbox.put(opened(1, num_tokens=8))
        assert len(inbox.take_all()) == 1
    inbox.put(opened(1))


def test_prompts_are_bounded_by_their_tokens_but_for_a_single_one():
    inbox = Inbox(max_tokens=100)
    inbox.put(opened(1, num_tokens=1000))
    with pytest.raises(
        CapacityError, match="1000 prompt tokens of this router wait already; 1 more would exceed 100"
    ) as refused:
        inbox.put(opened(1))
    assert refused.value.reason == TOO_MANY_TOKENS
    inbox.put(opened(2, num_tokens=60))
    inbox.put(opened(2, num_tokens=40))
    with pytest.raises(CapacityError, match="100 prompt tokens of this router wait already"):
        inbox.put(opened(2))
