"""Adapters (LoRA) on a decode node: whose tokens a request gets, and what is shared between requests."""

from __future__ import annotations

from functools import partial

import pytest

from decode_node.drafting.gather import LocalProposer
from outrider.request import Adapter
from outrider.session import Rejected, RejectReason, SampleStart
from outrider.speculation.acceptance_record import PRIOR_ACCEPTANCE
from tests.decode_node.conftest import SHORT_PROMPT
from tests.decode_node.tiny_node import PROMPT, generate, tiny_nodes
from tests.support.adapters import ScriptedAdapters, make_adapter
from tests.support.scripted_proposer import ScriptedProposer

SQL, LAW = Adapter("sql", "1" * 64), Adapter("law", "2" * 64)
LONG_PROMPT = tuple(range(1, 30))  # seven blocks of four tokens, and one token: transferred


@pytest.fixture
def adapters():
    return ScriptedAdapters(SQL, LAW, vocab_size=64)


@pytest.fixture
def node(make_scripted_node, adapters):
    return make_scripted_node(adapters=adapters)


def test_each_request_gets_the_tokens_of_its_adapter(node, adapters):
    groups = {each: node.open(adapter=each) for each in (None, SQL, LAW)}
    node.run()
    assert node.tokens(groups.pop(None)) == node.model.generate(SHORT_PROMPT, 5)
    for adapter, group_id in groups.items():
        assert node.tokens(group_id) == adapters.find(adapter).generate(SHORT_PROMPT, 5)
    node.assert_nothing_is_held()


@pytest.mark.parametrize("adapter", [Adapter("tax", "1" * 64), Adapter("sql", "3" * 64)], ids=["name", "fingerprint"])
def test_an_adapter_that_the_node_does_not_have_is_rejected(node, adapter):
    group_id = node.open(prompt=LONG_PROMPT, adapter=adapter)
    node.iterate()
    (rejected,) = node.find(Rejected, group_id)
    assert rejected.reason is RejectReason.NO_ADAPTER
    assert str(adapter) in rejected.message
    assert not node.ingest.specs, "no transfer may begin"
    node.assert_nothing_is_held()


def test_kv_is_transferred_for_an_adapter_and_its_request_survives_the_unloading(node, adapters):
    expected = adapters.find(SQL).generate(LONG_PROMPT, 5)
    group_id = node.open(prompt=LONG_PROMPT, adapter=SQL)
    node.granted(group_id)
    adapters.unload("sql")
    node.push(group_id, LONG_PROMPT)
    node.run()
    assert node.tokens(group_id) == expected


def test_samples_that_are_preempted_keep_their_adapter_although_it_is_unloaded(make_scripted_node, adapters):
    node = make_scripted_node(adapters=adapters, num_blocks=40)
    expected = adapters.find(SQL).generate(SHORT_PROMPT, 40)
    sampling = {"n": 3, "max_tokens": 40, "temperature": 0.0}
    group_id = node.open(adapter=SQL, sampling=sampling, samples=tuple(map(SampleStart, range(3))))
    node.granted(group_id)
    adapters.unload("sql")
    held = node.engine.pool.allocate(node.engine.pool.num_free_blocks - 16)
    node.run()
    assert node.num_preempted
    for sample in range(3):
        assert node.tokens(group_id, sample) == expected
    node.engine.pool.release(held)
    node.assert_nothing_is_held()


def test_the_prefix_cache_is_shared_by_requests_of_one_adapter_only(node):
    hits = []
    for adapter in (SQL, SQL, LAW, None, None):
        group_id = node.open(prompt=LONG_PROMPT, adapter=adapter)
        granted = node.granted(group_id)
        hits.append(granted.held_prefix_length)
        if granted.kv_address:
            node.push(group_id, LONG_PROMPT)
        node.run()
    assert hits == [0, 28, 0, 0, 28]


def test_drafters_know_nothing_of_adapters_and_acceptance_is_learnt_for_each(make_scripted_node, adapters):
    text = (*SHORT_PROMPT, *make_scripted_node().model.generate(SHORT_PROMPT, 12))
    own = adapters.find(SQL).generate(SHORT_PROMPT, 2)
    proposer = ScriptedProposer([text, (*SHORT_PROMPT, own[0], own[1] ^ 1, 1)])
    node = make_scripted_node(adapters=adapters, proposers=[proposer], num_speculative_tokens=3)
    for adapter in (None, SQL) * 12:
        node.open(adapter=adapter, sampling={"max_tokens": 12})
        node.run()
    assert node.num_drafted
    assert {request.start.options.adapter for request in proposer.requests} == {None}
    source = node.groups._drafts._controller.source(proposer.info.name)
    assert source.priors_of("").overall.mean > PRIOR_ACCEPTANCE > source.priors_of(SQL.fingerprint).overall.mean + 0.2
    assert source.priors_of(LAW.fingerprint).overall.mean == PRIOR_ACCEPTANCE


@pytest.fixture(scope="module")
def directories(model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / name, model_path, seed=seed) for seed, name in enumerate(("one", "two"), start=1)]


@pytest.mark.usefixtures("fixed_step_times")
def test_rows_of_several_adapters_and_drafts_share_steps_on_a_real_model(model_path, directories):
    with tiny_nodes() as make:
        make_node = partial(make, model_path)
        plain = make_node()
        settings = [f"{each.name}={each}" for each in directories]
        alone = make_node(adapters=settings)
        one, two = alone.parts.adapters.adapters
        expected = {None: generate(plain), **{each: generate(alone, adapter=each) for each in (one, two)}}
        assert len({tuple(tokens) for tokens in expected.values()}) == 3
        assert generate(alone) == expected[None]
        for texts in ((), [(*PROMPT, *tokens) for tokens in expected.values()]):
            node = make_node(adapters=settings)
            node.loop._drafts._local = [LocalProposer(ScriptedProposer(texts))]
            groups = [(adapter, node.open(adapter=adapter)) for adapter in (one, None, two, one, None)]
            node.run()
            for adapter, group_id in groups:
                assert node.tokens(group_id) == expected[adapter]
            assert bool(node.num_drafted) == bool(texts)
