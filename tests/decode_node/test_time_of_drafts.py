"""Drafts on a device that computes beside the host must not cost more time than they gain.

Time is simulated: a pass takes DEVICE seconds of the device, and the host needs HOST seconds to plan and commit a step.
"""

from __future__ import annotations

import pytest

from outrider.drafting.book import StepDrafts
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposerInfo
from outrider.speculation.proposers.ngram import NgramProposer
from tests.decode_node.conftest import Node
from tests.support.fake_drafts import TextDrafts

DEVICE, HOST = 0.003, 0.001
PROMPTS = [(1, 2, 3), (4, 5), (9,)]
NUM_TOKENS = 150


class SuspendedDrafts(TextDrafts):
    """A draft node that is late, as it has been suspended."""

    def take(self, sequence_ids, *, wait_seconds):
        return StepDrafts(requested=super().take(sequence_ids, wait_seconds=wait_seconds).requested)


class EverySixth:
    """A lookup that finds the next four tokens, but only after every sixth token."""

    info = ProposerInfo(name="lookup")
    num_wasted_tokens = 0

    def __init__(self, model):
        self._model = model

    def propose(self, requests):
        return [Proposal(sequence_id=each.sequence_id, tree=self._find(each)) for each in requests]

    def _find(self, request):
        length = len(request.token_ids)
        is_found = length % 6 == 0 and request.num_wanted > 0
        return DraftTree(length, None, self._model.generate(request.token_ids, 4) if is_found else ())

    def forget(self, sequence_id):
        pass


def timed_node(**options):
    node = Node(is_asynchronous=True, num_blocks=256, **options)
    clock, device = node.clock, node.engine.runner
    busy_until = 0.0

    def launched():
        nonlocal busy_until
        busy_until = max(busy_until, clock()) + DEVICE

    def taking(seconds, method):
        return lambda *arguments: (clock.advance(seconds), method(*arguments))[1]

    device.on_launch, device.on_wait = launched, lambda: clock.advance(max(busy_until - clock(), 0.0))
    node.loop.progress.clock = clock
    node.loop._plan = taking(HOST / 2, node.loop._plan)
    node.loop._commit = taking(HOST / 2, node.loop._commit)
    return node


def seconds_of(node, num_groups=1):
    """Returns the duration of the last of several groups of answers."""
    for _ in range(num_groups):
        started = node.clock()
        groups = [node.open(prompt=prompt, sampling={"max_tokens": NUM_TOKENS}) for prompt in PROMPTS]
        node.run()
        assert [node.tokens(group) for group in groups] == [node.model.generate(each, NUM_TOKENS) for each in PROMPTS]
    return node.clock() - started


@pytest.fixture(scope="module")
def plain_seconds():
    return seconds_of(timed_node())


def test_plain_decoding_keeps_the_device_busy(plain_seconds):
    assert plain_seconds == pytest.approx(NUM_TOKENS * DEVICE, rel=0.03)


@pytest.mark.parametrize("drafts", [None, TextDrafts(lambda _tokens, _num: None), SuspendedDrafts()])
def test_drafters_without_drafts_do_not_slow_the_target_down(plain_seconds, drafts):
    node = timed_node(num_speculative_tokens=4, proposers=[NgramProposer()], drafts=drafts)
    assert seconds_of(node, num_groups=4) < 1.05 * plain_seconds


def test_a_draft_node_that_is_suspended_is_not_waited_for_even_at_first(plain_seconds):
    node = timed_node(num_speculative_tokens=4, proposers=[NgramProposer()], drafts=SuspendedDrafts())
    assert seconds_of(node) < 1.05 * plain_seconds


def test_wrong_drafts_hardly_slow_the_target_down(plain_seconds):
    node = timed_node(num_speculative_tokens=4, drafts=TextDrafts(lambda _tokens, num_wanted: (0,) * num_wanted))
    assert seconds_of(node, num_groups=4) < 1.05 * plain_seconds


def test_right_drafts_are_verified_in_every_step(plain_seconds):
    drafts = TextDrafts(timed_node().model.generate)
    node = timed_node(num_speculative_tokens=4, proposers=[NgramProposer()], drafts=drafts)
    assert seconds_of(node) < 0.35 * plain_seconds


def test_drafts_that_come_without_notice_are_used_if_they_come_often(plain_seconds):
    node = timed_node(num_speculative_tokens=4, proposers=[EverySixth(timed_node().model)])
    assert seconds_of(node, num_groups=2) < 0.6 * plain_seconds
