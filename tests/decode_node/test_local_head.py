"""The decode loop with a drafter head beside it, fed from the paged plane of features."""

from __future__ import annotations

import pytest
import torch

import outrider.heads.open
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.heads.of_target import open_packed_head
from outrider.speculation.proposers.head_proposer import load_head
from outrider.speculation.step_cost import StepCostModel
from tests.decode_node.tiny_node import PROMPT, TinyNode, generate, tiny_nodes
from tests.heads.golden_heads import rewrite_config
from tests.support.echo_head import EchoHead, make_echo_folder, make_echo_model
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("fixed_step_times")

HOT = {"temperature": 1.0}
LONG = tuple((7 * i) % 250 + 10 for i in range(90))


@pytest.fixture(scope="module")
def echo_path(tmp_path_factory):
    return make_echo_model(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """The head's folder, shared by all tests, because each new folder would be read again and fill the cache."""
    return str(make_echo_folder(tmp_path_factory.mktemp("heads") / "parrot"))


@pytest.fixture
def make_head_node(echo_path, parrot, monkeypatch):
    """Decode loops on a target whose head is always right. Rows are free, so that all drafts are verified.

    Drafts are chains, since one of two siblings would be wrong.
    """
    monkeypatch.setattr(outrider.heads.open, "FORMS", (EchoHead,))
    monkeypatch.setattr(StepCostModel, "seconds", lambda *_, num_more=0: [1.0] * (num_more + 1))
    monkeypatch.setattr(EchoHead, "opened", [])
    with tiny_nodes() as make_tiny:

        def make(*, head=parrot, **config):
            node = make_tiny(echo_path, head=head, **{"draft_trees": False, **config})
            node.loop._drafts._clock = lambda: 0.0  # drafting costs nothing, either
            return node

        yield make


def assert_fed_rightly(*texts) -> None:
    """Asserts that rows with features of the target are of these texts, each with the feature of the token before."""
    fed = [row for head in EchoHead.opened for row in head.fed]
    known = {(place, *text[place : place + 2]) for text in texts for place in range(len(text) - 1)}
    assert set(fed) <= known
    assert len({place for place, *_ in fed}) > len(PROMPT)


@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "hot"])
def test_drafts_of_a_head_are_verified_and_tokens_are_those_without(make_head_node, sampling):
    plain = make_head_node(head="")
    expected = generate(plain, sampling=sampling)
    node = make_head_node()
    assert generate(node, sampling=sampling) == expected
    assert node.num_accepted == node.num_drafted > 25
    assert len(node.stats) < len(plain.stats) / 3
    assert_fed_rightly([*PROMPT, *expected])
    node.assert_nothing_is_held()


def test_prefix_hits_and_preemption_leave_features_as_they_were(make_head_node):
    prompts = [(*LONG[:20], i, i + 1) for i in range(10, 14)]
    sampling = {**HOT, "max_tokens": 120}
    roomy = make_head_node(head="")
    expected = [generate(roomy, prompt=prompt, sampling=sampling) for prompt in prompts]
    tight = make_head_node()
    assert generate(tight, prompt=prompts[0], sampling=sampling) == expected[0]
    pool = tight.parts.engine.pool
    groups = [tight.open(prompt=prompt, sampling=sampling) for prompt in prompts]
    tight.iterate()
    held = pool.allocate(pool.num_free_blocks - 12)  # four sequences of 140 tokens need 36
    tight.run()
    assert tight.num_preempted > 0
    assert [tight.tokens(group) for group in groups] == expected
    assert tight.num_accepted == tight.num_drafted > 200
    assert_fed_rightly(*([*prompt, *text] for prompt, text in zip(prompts, expected, strict=True)))
    pool.release(held)
    tight.assert_nothing_is_held()


def test_a_long_prompt_is_caught_up_with_while_its_sequence_decodes(make_head_node):
    plain, node = (make_head_node(max_local_prefill_tokens=999, **head) for head in ({"head": ""}, {}))
    prompt = (LONG * 9)[:700]
    expected = generate(plain, prompt=prompt, sampling={"max_tokens": 60})
    assert generate(node, prompt=prompt, sampling={"max_tokens": 60}) == expected
    assert node.num_accepted == node.num_drafted > 10
    assert_fed_rightly([*prompt, *expected])


def test_siblings_are_verified_if_trees_are_on(make_head_node, monkeypatch):
    monkeypatch.setattr(EchoHead, "is_confused", True)
    expected = generate(make_head_node(head=""))
    node = make_head_node(draft_trees=True)
    assert generate(node) == expected
    assert node.num_accepted > 5, "the head's second choice, which is right"
    assert_fed_rightly([*PROMPT, *expected])


def test_look_up_and_head_draft_side_by_side(make_head_node):
    expected = generate(make_head_node(head=""), sampling=HOT)
    node = make_head_node(local_lookup="ngram", kv_cache=KVCacheConfig(num_blocks=256, prefix_cache=False))
    assert generate(node, sampling=HOT) == expected
    assert node.num_accepted > 20


def test_the_node_names_its_head_unless_draft_nodes_propose_with_it(make_head_node):
    assert make_head_node().parts.model.proposer == "echo:parrot"
    other = make_head_node(local_head=False, local_lookup="ngram")
    assert other.parts.model.proposer == "ngram"
    assert other.parts.model.features is not None


@pytest.mark.usefixtures("one_thread")
def test_torch_computes_a_head_in_as_many_threads_as_its_target_has(make_head_node):
    make_head_node()
    torch.set_num_threads(2)  # as if the target's packed weights did not need torch
    make_head_node()
    assert torch.get_num_threads() == 1, "of TinyNode"


def test_a_head_of_no_known_form_ends_the_start(make_head_node, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"architectures": ["Odd"]}')
    with pytest.raises(ConfigError, match="has an unknown form"):
        make_head_node(head=str(tmp_path / "odd"))


@pytest.mark.parametrize("sampling", [{}, {**HOT, "n": 2}], ids=["greedy", "hot"])
def test_an_eagle3_head_changes_no_token(model_path, tmp_path, sampling, monkeypatch):
    monkeypatch.setattr(StepCostModel, "seconds", lambda *_, num_more=0: [1.0] * (num_more + 1))
    head, _ = make_random_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    plain, node = TinyNode(model_path), TinyNode(model_path, head=str(head))
    node.loop._drafts._clock = lambda: 0.0
    for each in (plain, node):
        group = each.open(sampling=sampling)
        each.run()
        each.close()
    assert node.parts.model.proposer == "eagle3:head"
    assert node.num_drafted > 0
    for sample in range(sampling.get("n", 1)):
        assert node.tokens(group, sample) == plain.tokens(group, sample)
    node.assert_nothing_is_held()


def test_a_head_that_is_replaced_between_the_two_looks_of_a_start_is_refused(tmp_path, monkeypatch):
    """Torch computes the head here, since a packed head is opened only once, so it cannot change between two looks."""
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    head, _ = make_random_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])

    def replaced(*given):
        rewrite_config(head, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
        return load_head(*given)

    monkeypatch.setattr("decode_node.drafting.local_proposers.load_head", replaced)
    monkeypatch.setattr("outrider.heads.of_target.open_packed_head", lambda *_: None)
    with pytest.raises(ConfigError, match="was replaced while the node started"):
        TinyNode(model, head=str(head))


def test_a_packed_head_is_opened_once(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    head, _ = make_random_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    opened = []

    def noting(*given):
        opened.append(open_packed_head(*given))
        return opened[-1]

    monkeypatch.setattr("outrider.heads.of_target.open_packed_head", noting)
    node = TinyNode(model, head=str(head))
    assert node.parts.model.proposer == "eagle3:head"
    node.close()
    if opened[0] is None:
        pytest.skip("torch computes the head here")
    assert len(opened) == 1
