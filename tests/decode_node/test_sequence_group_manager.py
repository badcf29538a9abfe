"""Grants, transfers, cancels and ends on a scripted engine: no block is lost, even if a peer misbehaves."""

from __future__ import annotations

import math

import pytest

from decode_node.commands import DrainStarted, SessionEnded, TransferCompleted
from outrider.request import Constraint, ConstraintKind, LogprobsRequest
from outrider.session import KvReady, Rejected, RejectReason, SampleDone, SampleStart
from tests.decode_node.conftest import SHORT_PROMPT
from tests.decode_node.test_reservations import SECOND, put_one_frame

LONG_PROMPT = tuple(range(1, 30))  # seven blocks of four tokens, and one token: transferred


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node()


def test_samples_cancelled_before_the_kv_is_there_never_start(node):
    group_id = node.open(prompt=LONG_PROMPT, sampling={"n": 3})
    node.granted(group_id)
    node.cancel(group_id, 0, 2, 7)
    node.iterate()
    node.retarget(group_id, SECOND)
    node.iterate()
    node.push(group_id, LONG_PROMPT, transfer_id=SECOND)
    node.run()
    assert node.tokens(group_id, 1) == node.model.generate(LONG_PROMPT, 5)
    assert [done.sample for done in node.find(SampleDone, group_id)] == [1]
    all_cancelled = node.open(prompt=LONG_PROMPT[::-1], sampling={"n": 2})
    node.granted(all_cancelled)
    node.cancel(all_cancelled, 0)
    node.cancel(all_cancelled, 1)
    node.iterate()
    node.assert_nothing_is_held()


def test_a_completed_transfer_behind_a_cancel_starts_nothing(node):
    group_id = node.open(prompt=LONG_PROMPT)
    node.granted(group_id)
    node.cancel(group_id)
    node.push(group_id, LONG_PROMPT)
    cancelled, completed = node.loop._inbox.take_batch()[::-1]
    assert isinstance(completed, TransferCompleted)
    for command in (cancelled, completed):
        node.loop.submit(command)
        node.iterate()
    assert not node.find(KvReady, group_id)
    node.assert_nothing_is_held()


def test_a_write_that_does_not_end_holds_its_blocks_but_not_the_steps(node):
    group_id = node.open(prompt=LONG_PROMPT)
    node.granted(group_id)
    with node.writing(put_one_frame, node, group_id[::-1]):
        other = node.open()
        node.cancel(group_id)
        node.run()
        assert node.tokens(other) == node.model.generate(SHORT_PROMPT, 5)
        assert node.groups.num_groups == 0
        pool = node.engine.pool
        assert pool.num_free_blocks == pool.num_blocks - 7

        too_large_now = node.open(prompt=tuple(range(30, 60)), sampling={"max_tokens": 150})
        held = pool.allocate(pool.num_free_blocks - 4)
        node.iterate()
        assert node.find(Rejected, too_large_now)[0].reason is RejectReason.NO_ROOM
        pool.release(held)
    node.iterate()
    node.assert_nothing_is_held()


def test_a_transfer_id_that_was_used_is_refused(node):
    """Otherwise events of the first transfer would be mistaken for events of the second, whose blocks are empty."""
    group_id = node.open(prompt=LONG_PROMPT)
    node.granted(group_id)
    node.cancel(group_id)
    node.push(group_id, LONG_PROMPT)
    again = node.open(prompt=LONG_PROMPT[::-1], transfer_id=group_id[::-1])
    node.run()
    assert node.find(Rejected, again)[0].reason is RejectReason.INVALID
    node.assert_nothing_is_held()


def test_a_session_that_ends_leaves_nothing_of_what_runs_or_waits_and_takes_nothing_from_another(node):
    running, other = node.open(), node.open(session=2)
    node.iterate()
    node.open(prompt=LONG_PROMPT)
    node.open(sampling={"n": 2})
    node.loop.submit(SessionEnded(1))
    node.run()
    node.assert_nothing_is_held()
    assert {event.sequence_group_id for event in node.events} == {running, other}
    assert len(node.tokens(running)) < 5
    assert node.tokens(other) == node.model.generate(SHORT_PROMPT, 5)


def test_a_loop_is_not_drained_while_commands_are_left_to_answer(node):
    late = [node.open() for _ in range(50)]  # more commands than one iteration takes
    node.loop.submit(DrainStarted())
    node.iterate()
    assert not node.loop.is_drained
    node.iterate()
    assert node.loop.is_drained
    assert [node.find(Rejected, group_id)[0].reason for group_id in late] == [RejectReason.DRAINING] * 50


def test_a_short_prompt_of_several_samples_is_computed_once(node):
    group = node.open(prompt=SHORT_PROMPT, sampling={"n": 3, "max_tokens": 1})
    node.run()
    assert len(node.find(SampleDone, group)) == 3
    assert node.num_rows == len(SHORT_PROMPT) + 2  # each other sample computes only the prompt's last token


def assert_refused(node, reason, fields):
    group_id = node.open(**fields)
    node.run()
    (rejected,) = node.find(Rejected, group_id)
    assert rejected.reason is reason
    node.assert_nothing_is_held()


@pytest.mark.parametrize(
    "fields",
    [
        *({"sampling": {"temperature": value}} for value in (math.nan, -1.0, math.inf)),
        *({"sampling": {"top_p": value}} for value in (0.0, math.nan, 1.5)),
        *({"sampling": {"min_p": value}} for value in (math.nan, 2.0)),
        *({"sampling": {"repetition_penalty": value}} for value in (0.0, math.inf)),
        {"sampling": {"presence_penalty": math.nan}},
        {"sampling": {"frequency_penalty": 3.0}},
        {"sampling": {"logit_bias": ((1, math.nan),)}},
        {"sampling": {"n": 0}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"constraint": Constraint(ConstraintKind.REGEX, "a")}},  # needs a tokenizer, and there is none
        {"logprobs": LogprobsRequest(num_top=10_000_000)},
        {"prompt_logprobs": 21},
        {"cache_salt": bytes(65)},
        {"prompt": ()},
        {"prompt": (1, 64)},
        *({"sampling": {"n": 2}, "samples": tuple(map(SampleStart, each))} for each in ((2,), (1, 0), (1, 1))),
        {"samples": (SampleStart(0, (64,)),)},
        {"samples": (SampleStart(0, (1,) * 5),)},
    ],
    ids=str,
)
def test_what_can_never_run_is_refused(make_scripted_node, fields):
    assert_refused(make_scripted_node(), RejectReason.INVALID, fields)


@pytest.mark.parametrize(
    "fields", [{"sampling": {"max_tokens": 198}}, {"sampling": {"n": 17}}, {"prompt": (1,) * 160}], ids=str
)
def test_what_is_larger_than_the_node_is_refused(make_scripted_node, fields):
    assert_refused(make_scripted_node(num_blocks=40), RejectReason.TOO_LARGE, fields)


def test_the_longest_request_fits_a_pool_of_one_window(make_scripted_node):
    """The prompt ends within a block. A copy of that block would need room, but only several samples would copy it."""
    node = make_scripted_node(num_blocks=50)  # each has 4 tokens
    group_id = node.open(prompt=(1, 2, 3), sampling={"max_tokens": 197})
    node.run()
    assert len(node.tokens(group_id)) == 197
    fields = {"prompt": (1, 2, 3), "sampling": {"max_tokens": 197, "n": 2}}
    assert_refused(make_scripted_node(num_blocks=50), RejectReason.TOO_LARGE, fields)
