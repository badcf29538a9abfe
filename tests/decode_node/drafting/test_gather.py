"""When drafters are told of a sequence, which drafts are verified, and how sources are judged."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from decode_node.drafting.gather import LocalProposer
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.session import Granted, KvReady, SampleStart, SampleTokens
from outrider.speculation.acceptance_record import PRIOR_ACCEPTANCE
from outrider.speculation.ask_cost import CallCost
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DRAFT_NODE
from tests.support.fake_drafts import NoDrafts, TextDrafts
from tests.support.scripted_proposer import ScriptedProposer

PROMPT = tuple(range(1, 21))  # longer than prompts that the node computes itself
SAMPLES = (SampleStart(0, ()), SampleStart(1, (7,)))


def node_with(make_scripted_node, **drafting):
    return make_scripted_node(num_blocks=200, num_speculative_tokens=3, **drafting)


def test_a_sequence_is_announced_at_the_grant_so_that_drafters_compute_its_prompt_meanwhile(make_scripted_node):
    client = TextDrafts()
    node = node_with(make_scripted_node, drafts=client)
    group = node.open(prompt=PROMPT, samples=SAMPLES, sampling={"n": 2})
    node.iterate()
    assert node.find(Granted, group)
    assert not node.find(KvReady, group)
    announced = dict(client.announced)
    assert sorted(announced.values()) == [(0, PROMPT), (1, (*PROMPT, 7))]
    node.push(group, PROMPT)
    node.iterate()
    assert node.find(KvReady, group)
    assert client.announced == announced
    node.run()
    assert client.announced == {}


def test_what_is_cancelled_before_its_kv_has_come_is_closed_with_the_draft_nodes(make_scripted_node):
    client = TextDrafts()
    node = node_with(make_scripted_node, drafts=client)
    group, other = node.open(prompt=PROMPT, samples=SAMPLES, sampling={"n": 2}), node.open(prompt=PROMPT[::-1])
    node.iterate()
    node.cancel(group, 0)
    node.iterate()
    assert sorted(client.announced.values()) == [(0, PROMPT[::-1]), (1, (*PROMPT, 7))]
    node.cancel(group)
    node.cancel(other)
    node.iterate()
    assert client.announced == {}


def test_the_fallback_learns_a_prompt_while_its_kv_is_transferred(make_scripted_node):
    """If the fallback read a long prompt only at the first draft, that step would take long."""
    fallback = ScriptedProposer([])
    node = node_with(make_scripted_node, proposers=[fallback])
    node.open()  # so that there are steps
    node.iterate()
    waiting = node.open(prompt=PROMPT)
    node.iterate()
    assert [(each.token_ids, each.num_wanted) for each in fallback.requests if each.token_ids == PROMPT] == [
        (PROMPT, 0)
    ]
    assert not node.find(KvReady, waiting)
    node.iterate()
    assert sum(each.token_ids == PROMPT for each in fallback.requests) == 1, "once is enough"


def test_the_time_in_which_a_prompt_was_read_ahead_is_not_taken_for_that_of_drafts(make_scripted_node, monkeypatch):
    heard = []
    observe = CallCost.observe
    monkeypatch.setattr(
        CallCost, "observe", lambda cost, *args, **asked: (heard.append(asked), observe(cost, *args, **asked))
    )
    fallback = ScriptedProposer([])
    node = node_with(make_scripted_node, proposers=[fallback])
    node.open()
    node.iterate()
    heard.clear()
    node.open(prompt=PROMPT)
    node.iterate()
    assert any(each.token_ids == PROMPT for each in fallback.requests)
    assert heard == []
    node.iterate()
    assert len(heard) == 1


@pytest.mark.parametrize("method", list(VerificationMethod))
def test_a_drawn_draft_is_asked_for_in_full_whatever_a_token_costs(method):
    """Otherwise the duration of a call would depend on drawn tokens that are not verified."""
    options = RequestOptions(sampling=SamplingParams(seed=1, max_tokens=9, temperature=1.0), verification_method=method)
    start = SequenceStart(options=options, sample=0, prompt_length=len(PROMPT))
    sequence = SimpleNamespace(key=1, token_ids=list(PROMPT))
    sample = SimpleNamespace(sequence=sequence, sampling=SimpleNamespace(constraint=None))
    request = LocalProposer(ScriptedProposer([])).request(sample, start, 3, min_reach=0.25)
    assert request.min_reach == (0.0 if method is VerificationMethod.REJECTION else 0.25)


@pytest.mark.usefixtures("fixed_step_times")
def test_of_two_drafts_the_better_one_is_verified_and_the_other_is_judged_by_what_was_committed(make_scripted_node):
    node = node_with(
        make_scripted_node,
        drafts=TextDrafts(lambda token_ids, _num_wanted: ((node.model.generate(token_ids, 1)[0] + 1) % 64,)),
        proposers=[Oracle(lambda: node.model)],
    )
    verified = []
    observe = node.loop._drafts.observe_verdict

    def note(sequence_id, draft, accepted):
        verified.append(draft.source)
        observe(sequence_id, draft, accepted)

    node.loop._drafts.observe_verdict = note
    node.open(sampling={"max_tokens": 60})
    node.run()
    assert set(verified[4:]) == {"scripted"}
    accepted = sum((Counter(stats.num_accepted_by_source) for stats in node.stats), Counter())
    assert accepted["scripted"] == node.num_accepted > 0
    controller = node.loop._drafts._controller
    assert controller._sources[DRAFT_NODE].priors_of("").acceptance[0].mean < PRIOR_ACCEPTANCE, "they were all wrong"


@pytest.mark.usefixtures("fixed_step_times")
def test_only_steps_that_asked_a_draft_node_count_as_hits_or_misses_of_one(make_scripted_node):
    node = node_with(make_scripted_node, drafts=NoDrafts(), proposers=[Oracle(lambda: node.model)])
    node.open(sampling={"max_tokens": 20})
    node.run()
    counts = [event.speculation for event in node.events if isinstance(event, SampleTokens)]
    assert any(each.num_accepted_draft_tokens for each in counts)
    assert not any(each.num_wanting_steps for each in counts)


class Noticed(NoDrafts):
    def __init__(self):
        self.steps = []

    def begin_step(self, verified):
        self.steps.append(verified)


@pytest.mark.usefixtures("fixed_step_times")
def test_draft_nodes_are_told_what_each_step_verifies_whoever_drafted_it(make_scripted_node):
    drafts = Noticed()
    node = node_with(make_scripted_node, drafts=drafts, proposers=[Oracle(lambda: node.model)])
    group = node.open(sampling={"max_tokens": 30})
    node.run()
    text, place = node.tokens(group), 0
    for (verified,) in (step.values() for step in drafts.steps if step):
        assert verified == tuple(text[place : place + len(verified)])
        place += len(verified) + 1
    assert place >= len(text) == 30
    assert max(len(*step.values()) for step in drafts.steps if step) > 1


class Oracle(ScriptedProposer):
    def __init__(self, model):
        super().__init__([])
        self._model = model

    def _continuation(self, token_ids, num_wanted):
        return tuple(self._model().generate(token_ids, num_wanted))
