"""If a sample's constraint allows no further token, its request fails, and no token after that point is reported."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2

from outrider.session import SampleDone, SequenceGroupFailed
from tests.decode_node.conftest import SHORT_PROMPT
from tests.support.scripted_proposer import ScriptedProposer


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node()


def failure(node, group):
    (failed,) = node.find(SequenceGroupFailed, group)
    assert (
        node.find(SequenceGroupFailed, group)[-1]
        is [event for event in node.events if getattr(event, "sequence_group_id", None) == group][-1]
    ), "nothing follows it"
    assert failed.code == code_pb2.INVALID_ARGUMENT
    return failed.message


def test_what_was_generated_before_is_reported_and_others_go_on(node):
    node.engine.sampler.fails_at[1] = 2
    group = node.open(sampling={"n": 2, "max_tokens": 5})
    other = node.open(prompt=(9, 9), sampling={"max_tokens": 5})
    node.run()
    assert failure(node, group) == "the constraint takes too much work"
    expected = node.model.generate(SHORT_PROMPT, 5)
    assert node.tokens(group, sample=1) == expected[:2]
    assert node.tokens(group, sample=0) == expected[:4], "a step ahead, as it has computed the prompt"
    assert node.tokens(other) == node.model.generate((9, 9), 5)
    node.assert_nothing_is_held()


@pytest.mark.parametrize("max_tokens", [3, 1])
def test_also_with_the_last_token(node, max_tokens):
    node.engine.sampler.fails_at[0] = max_tokens - 1
    group = node.open(sampling={"max_tokens": max_tokens})
    node.run()
    assert failure(node, group)
    assert len(node.tokens(group)) == max_tokens - 1
    assert not node.find(SampleDone, group)
    node.assert_nothing_is_held()


def test_all_samples_at_once_fail_their_request_once(node):
    node.engine.sampler.fails_at.update({0: 1, 1: 1})
    group = node.open(sampling={"n": 2, "max_tokens": 5})
    node.run()
    assert failure(node, group)
    node.assert_nothing_is_held()


def test_a_draft_that_leads_there_is_not_reported_either(make_scripted_node):
    model = make_scripted_node().model
    text = [*SHORT_PROMPT, *model.generate(SHORT_PROMPT, 8)]
    node = make_scripted_node(num_speculative_tokens=3, proposers=[ScriptedProposer([text])])
    node.engine.sampler.fails_at[0] = 3
    group = node.open(sampling={"max_tokens": 8})
    node.run()
    assert failure(node, group)
    found = node.tokens(group)
    assert found == text[len(SHORT_PROMPT) :][: len(found)]
    assert len(found) <= 3
    node.assert_nothing_is_held()


@pytest.mark.parametrize("fails_at", range(5))
def test_a_cancel_in_the_same_step_wins_or_comes_too_late(node, fails_at):
    node.engine.sampler.fails_at[0] = fails_at
    group = node.open(sampling={"max_tokens": 5})
    for _ in range(fails_at + 1):
        node.iterate()
    node.cancel(group)
    node.run()
    assert len(node.find(SequenceGroupFailed, group)) <= 1
    node.assert_nothing_is_held()
