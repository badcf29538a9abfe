"""The promises of heads of every form: tokens are the same as without drafts, and some drafts are accepted.

Whole decode loops run on a tiny random target. Its forward writes features to the paged plane, a random head drafts
from them, and the target verifies. Such a head is right only by chance. But at a high temperature, the random numbers
that head and target share for each position matter more than the logits.
"""

from __future__ import annotations

import functools
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from outrider.request import VerificationMethod
from outrider.speculation.step_cost import StepCostModel
from outrider.speculation.verify.by_request import RequestVerifier
from tests.decode_node.tiny_node import generate, tiny_nodes
from tests.support.head_files import HEADS, Maker, make_head
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("fixed_step_times", "one_thread")

GREEDY = {"temperature": 0.0, "max_tokens": 40}
HOT = {"temperature": 5.0, "max_tokens": 60}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
FILTERED = {"temperature": 4.0, "max_tokens": 60, "top_p": 0.97, "min_p": 0.01, "top_k": 250, **PENALTIES}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head_of(target_path, tmp_path_factory):
    """head_of(form) → folder of the head, which is written once, because every new folder is packed into the cache."""
    return functools.cache(lambda form: make_head(form, tmp_path_factory.mktemp("heads") / form, target_path))


@pytest.fixture
def make_node(target_path, head_of, monkeypatch):
    """Decode loops in which rows and drafts cost nothing, so that every draft is verified."""
    monkeypatch.setattr(StepCostModel, "seconds", lambda *_, num_more=0: [1.0] * (num_more + 1))
    with tiny_nodes() as make_tiny:

        def make(form="", *, target=target_path, head="", **config):
            if form:
                head = str(head_of(form))
            node = make_tiny(target, head=head, **config)
            node.loop._drafts._clock = lambda: 0.0
            return node

        yield make


@pytest.fixture(scope="module")
def undisturbed():
    """Tokens without drafts, by sampling parameters. They are computed once for all heads."""
    return {}


@pytest.fixture
def without_drafts(make_node, undisturbed):
    """without_drafts(sampling) → the tokens that `generate` gives without drafts."""

    def tokens(sampling):
        key = tuple(sampling.items())
        if key not in undisturbed:
            undisturbed[key] = generate(make_node(), sampling=sampling)
        return undisturbed[key]

    return tokens


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("sampling", [HOT, FILTERED], ids=["hot", "filtered"])
def test_tokens_are_those_without_drafts_and_some_drafts_are_accepted(form, sampling, make_node, without_drafts):
    node = make_node(form)
    assert generate(node, sampling=sampling) == without_drafts(sampling)
    assert node.num_accepted > 5
    assert node.parts.model.proposer.startswith(f"{form}:")
    node.assert_nothing_is_held()


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("method", VerificationMethod)
def test_at_temperature_0_every_method_commits_the_best_tokens(form, method, make_node, without_drafts):
    node = make_node(form)
    assert generate(node, sampling=GREEDY, verification_method=method) == without_drafts(GREEDY)
    assert node.num_drafted > 20


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("method", [VerificationMethod.REJECTION, VerificationMethod.TYPICAL])
def test_other_methods_take_its_drafts_and_give_the_same_again(form, method, make_node):
    """tests/statistical/test_heads.py tests the distribution of these tokens."""
    nodes = [make_node(form) for _ in range(2)]
    sampling = {**HOT, "max_tokens": 120}
    first, second = (generate(node, sampling=sampling, verification_method=method) for node in nodes)
    assert first == second
    assert len(first) == sampling["max_tokens"]
    assert nodes[0].num_accepted > 10


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_siblings_go_along_and_leave_tokens_as_they_are(form, sampling, make_node, without_drafts, monkeypatch):
    expected = without_drafts(sampling)
    verified, queue = [], RequestVerifier.queue
    monkeypatch.setattr(
        RequestVerifier, "queue", lambda self, logits, drafts: verified.extend(drafts) or queue(self, logits, drafts)
    )
    node = make_node(form)
    assert generate(node, sampling=sampling) == expected
    assert any(draft.parents for draft in verified)


def tokens_of_a_batch(node):
    """Returns the tokens of each sample of a batch of requests, the last of which has two samples."""
    groups = [
        node.open(prompt=(11 + place, *range(20, 24 + 5 * place)), sampling=each)
        for place, each in enumerate((GREEDY, HOT, FILTERED, {**HOT, "n": 2}))
    ]
    node.run()
    return [*(node.tokens(group) for group in groups), node.tokens(groups[-1], 1)]


@pytest.mark.parametrize("form", HEADS)
def test_a_batch_of_different_requests_gives_each_its_own_tokens(form, make_node, undisturbed):
    if "batch" not in undisturbed:
        undisturbed["batch"] = tokens_of_a_batch(make_node())
    node = make_node(form)
    assert tokens_of_a_batch(node) == undisturbed["batch"]
    assert node.num_accepted > 10
    node.assert_nothing_is_held()


def test_the_targets_own_checkpoint_may_have_the_head(target_path, tmp_path, make_node, without_drafts):
    """As in DeepSeek's and GLM's models, the head is a layer after the last one, which the target's forward skips."""
    folder = shutil.copytree(target_path, tmp_path / "whole")
    names = {"input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm"}
    names |= {"final_layernorm": "shared_head.norm"}
    head = load_file(make_head("mtp", tmp_path / "mtp", target_path) / "model.safetensors")
    own = {}
    for name, tensor in head.items():
        short, ending = name.removeprefix("mtp_layers.0.").rsplit(".", 1)
        own[f"model.layers.3.{names.get(short, short)}.{ending}"] = tensor
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | own, weights, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    node = make_node(target=folder, head=str(folder))
    assert generate(node, sampling=HOT) == without_drafts(HOT)
    assert node.num_accepted > 5
    assert node.parts.model.proposer == "mtp:whole"


def test_a_target_with_latent_attention_has_its_mtp_layer_in_its_checkpoint(tmp_path, make_node):
    """The head keeps latent vectors, too. Its layer has experts, as in DeepSeek-V3."""
    settings = {"num_hidden_layers": 4, "first_k_dense_replace": 3}
    folder = make_tiny_model(tmp_path / "whole", architecture="deepseek_v3", overrides=settings)
    make = Maker(0)
    make.matrix("model.layers.3.eh_proj", 64, 2 * 64)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        make.vector(f"model.layers.3.{norm}.weight", 64)
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(weights) | make.tensors, weights, metadata={"format": "pt"})
    counts = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | counts))
    node = make_node(target=folder, head=str(folder))
    assert generate(node, sampling=HOT) == generate(make_node(target=folder), sampling=HOT)
    assert node.num_accepted > 5
    assert node.parts.model.proposer == "mtp:whole"
    node.assert_nothing_is_held()


# Negative controls


@pytest.mark.parametrize("form", HEADS)
def test_tokens_would_differ_if_drafts_were_committed_unverified(form, make_node, without_drafts, monkeypatch):
    """Simulates a mistake: drafted tokens count as decided."""
    expected = without_drafts(HOT)
    # The verifier reads the row of each draft token as if the target had been sure of it.
    queue = RequestVerifier.queue

    def sure_of_drafts(self, logits, drafts):
        row = 0
        for draft in drafts:
            for place, token_id in enumerate(draft.draft_token_ids):
                logits[row + place, token_id] = 1e4
            row += draft.rows.num_rows
        return queue(self, logits, drafts)

    monkeypatch.setattr(RequestVerifier, "queue", sure_of_drafts)
    assert generate(make_node(form), sampling=HOT) != expected
