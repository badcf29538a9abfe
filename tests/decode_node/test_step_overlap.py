"""A decode loop with forward passes on a device: the work that the loop does meanwhile, and its effects."""

from __future__ import annotations

import itertools

import pytest

from decode_node.commands import DrainExpired, DrainStarted, RouterCommand, SessionEnded
from outrider.request import RequestOptions, SamplingParams
from outrider.session import (
    Granted,
    OpenSequenceGroup,
    Rejected,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
)
from tests.decode_node.conftest import SHORT_PROMPT, Node
from tests.decode_node.driven_node import SESSION

LONG_PROMPT = tuple(range(10, 40))
UNAVAILABLE = 14  # google.rpc.Code


@pytest.fixture
def node():
    return Node(is_asynchronous=True)


def once(do):
    """Returns a hook that calls `do` only the first time."""
    calls = itertools.count()
    return lambda: None if next(calls) else do()


def in_one_step(node, do):
    """Runs the next step and calls `do` while the device computes. Returns all events until the wait for the device."""
    told = []
    device = node.engine.runner
    if device.is_computing:
        do()
    else:
        device.on_launch = once(do)
    device.on_wait = once(lambda: told.extend(node.events))
    node.iterate()
    device.on_launch = device.on_wait = lambda: None
    return told


def test_a_step_is_told_of_while_the_device_computes_the_next_one(node):
    group = node.open(sampling={"max_tokens": 3})
    log = []
    device = node.engine.runner
    device.on_launch = lambda: log.append("launch")
    device.on_wait = lambda: log.append("wait")
    emit = node.loop._emit
    node.loop._emit = lambda events, stats: (stats and log.append("tell"), emit(events, stats))
    node.run()
    assert log == ["launch", "wait", "launch", "tell", "wait", "launch", "tell", "wait", "tell"]
    assert node.tokens(group) == node.model.generate(SHORT_PROMPT, 3)


@pytest.mark.parametrize(("is_asynchronous", "max_tokens"), [(True, 1), (False, 5)])
def test_a_step_that_none_follows_or_without_a_device_is_told_of_at_its_end(is_asynchronous, max_tokens):
    node = Node(is_asynchronous=is_asynchronous)
    group = node.open(sampling={"max_tokens": max_tokens})
    node.iterate()
    assert node.tokens(group) == node.model.generate(SHORT_PROMPT, 1)
    assert bool(node.find(SampleDone, group)) is (max_tokens == 1)


def test_a_group_is_granted_while_the_device_computes(node):
    node.open()
    second = []
    told = in_one_step(node, lambda: second.append(node.open(prompt=LONG_PROMPT)))
    assert [event.sequence_group_id for event in told if isinstance(event, Granted)][1:] == second


def test_what_the_running_step_uses_is_freed_after_it(node):
    first, second = node.open(), node.open(prompt=(4, 5))
    node.iterate()
    before = node.engine.pool.num_free_blocks
    free, finish = [], node.engine.runner.finish
    node.engine.runner.finish = lambda: (free.append(node.engine.pool.num_free_blocks), finish())
    told = in_one_step(node, lambda: node.cancel(first))
    assert free == [before]
    assert len(node.tokens(first)) == 1  # from the previous step, which was reported in time
    assert any(isinstance(event, SampleTokens) and event.sequence_group_id == first for event in told)
    node.run()
    assert not node.find(SampleDone, first)
    assert node.tokens(second) == node.model.generate((4, 5), 5)
    node.assert_nothing_is_held()


def test_commands_keep_their_order_behind_one_that_waits(node):
    """A group with the same id is opened right after the cancel. In the opposite order, it would be refused."""
    first = node.open()
    node.iterate()
    sampling = SamplingParams(seed=7, max_tokens=2, temperature=0.0)
    again = OpenSequenceGroup(
        sequence_group_id=first,
        transfer_id=bytes(16),
        request_id="r",
        prompt_token_ids=(9, 8),
        samples=(SampleStart(0),),
        options=RequestOptions(sampling=sampling),
    )

    def cancel_and_open_again():
        node.cancel(first)
        node.loop.submit(RouterCommand(SESSION, again, "decode"))

    told = in_one_step(node, cancel_and_open_again)
    assert len([event for event in told if isinstance(event, Granted)]) == 1
    node.run()
    assert not node.find(Rejected, first)
    assert len(node.find(Granted, first)) == 2
    assert node.tokens(first)[-2:] == node.model.generate((9, 8), 2)


def test_a_session_that_ends_while_the_device_computes_hears_no_more(node):
    node.open()
    node.iterate()
    in_one_step(node, lambda: node.loop.submit(SessionEnded(SESSION)))
    num_events = len(node.events)
    node.run()
    assert len(node.events) <= num_events + 1  # at most the events that were already decided
    node.assert_nothing_is_held()


def test_what_was_decided_is_told_before_its_group_is_given_up(node):
    group = node.open(sampling={"max_tokens": 20})
    node.iterate()
    node.loop.submit(DrainExpired())
    node.run()
    assert [type(event) for event in node.events if event.sequence_group_id == group] == [
        Granted,
        SampleTokens,
        SequenceGroupFailed,
    ]
    assert node.find(SequenceGroupFailed, group)[0].code == UNAVAILABLE


def test_a_drained_node_has_told_everything(node):
    group = node.open()
    node.iterate()
    in_one_step(node, lambda: node.loop.submit(DrainStarted()))
    refused = node.open()
    drained_before_the_end = []
    emit = node.loop._emit
    node.loop._emit = lambda *told: (drained_before_the_end.append(node.loop.is_drained), emit(*told))
    node.run()
    assert node.find(Rejected, refused)
    assert node.tokens(group) == node.model.generate(SHORT_PROMPT, 5)
    assert node.loop.is_drained
    assert not any(drained_before_the_end)


def test_a_node_that_stops_tells_of_its_last_step(node):
    group = node.open(sampling={"max_tokens": 40})
    node.engine.runner.on_wait = once(node.loop.stop)
    node.loop.run()
    assert len(node.find(SampleTokens, group)) == 1
    node.assert_nothing_is_held()
