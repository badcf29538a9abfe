"""Rollouts draft what a call for each token does. In Triton's interpreter, where a graph is the same call again."""

from __future__ import annotations

import pytest
import torch

from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from tests.support.pool_integrity import check_proposer
from tests.support.toy_head import ToyFeatures, ToyHead

pytest.importorskip("triton")
rolling = pytest.importorskip("tests.support.rolling")
pytestmark = pytest.mark.triton

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19]
GREEDY = {"temperature": 0.0}
HOT = {"temperature": 0.9}
FILTERED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
PENALISED = {"temperature": 0.9, "presence_penalty": 0.7}
BIASED_LATER = {"temperature": 0.9, "min_tokens": 3}
KINDS = ["model", "head", "head of few ids"]


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(tiny_model), kernels="torch"))


@pytest.fixture
def graphs():
    return rolling.Graphs()


@pytest.fixture(params=KINDS)
def pair(request, model, graphs, monkeypatch):
    """A proposer with a call for each token, and one with rollouts."""
    rolling.small(monkeypatch)
    forwards = []
    for _ in range(2):
        if request.param == "model":
            forwards.append(rolling.model_forward(model))
        else:
            head = ToyHead(has_own_vocabulary=request.param != "head")
            forwards.append(rolling.toy_head_forward(head, monkeypatch))
    info = ProposerInfo(name=f"{request.param}:tiny")
    return [DraftModelProposer(each, info) for each in (forwards[0], forwards[1].rolling_out(graphs.capture))]


def request(token_ids, num_wanted, params=HOT, *, key=1, takes_trees=False, **fields):
    options = RequestOptions(
        sampling=SamplingParams(**{"seed": 5, "max_tokens": 400} | params),
        verification_method=fields.pop("verification_method", VerificationMethod.COUPLED),
        stop_token_ids=fields.pop("stop_token_ids", ()),
    )
    start = SequenceStart(options=options, sample=0, prompt_length=len(PROMPT), takes_trees=takes_trees)
    return ProposalRequest(key, token_ids, num_wanted, start, features=ToyFeatures(token_ids), **fields)


def drafts_of(proposer, *requests):
    """The proposals, once all are done, and after how many calls."""
    done, num_calls = {}, 0
    while len(done) < len(requests):
        num_calls += 1
        asked = [each for each in requests if each.sequence_id not in done]
        proposals = proposer.propose(asked)
        check_proposer(proposer)
        done |= {each.sequence_id: each for each in proposals if each.progress is Progress.DONE}
        assert num_calls < 100
    return [done[each.sequence_id] for each in requests], num_calls


def paths_of(proposer):
    """What is remembered of each sequence, without states."""
    return {
        key: (tree.main.kv.num_tokens, [(each.token_ids, each.confidence) for each in tree.main.decided])
        for key, tree in proposer._trees.items()
    }


def assert_alike(one, other):
    found, expected = paths_of(one), paths_of(other)
    assert found.keys() == expected.keys()
    for key, (num_tokens, decided) in found.items():
        assert num_tokens == expected[key][0]
        assert [ids for ids, _ in decided] == [ids for ids, _ in expected[key][1]]
        confidences = [[sure for _, sure in each] for each in (decided, expected[key][1])]
        assert confidences[0] == pytest.approx(confidences[1], rel=1e-4)


@pytest.mark.parametrize("params", [GREEDY, HOT, FILTERED], ids=["greedy", "hot", "filtered"])
def test_tokens_siblings_confidences_and_caches_are_the_same(pair, graphs, params):
    text = list(PROMPT)
    for num_wanted, num_agreeing in ((5, 2), (1, 0), (4, 4), (8, 3), (2, 2)):
        asked = request(text, num_wanted, params, takes_trees=num_wanted > 2)
        graphs.num_replays = 0
        (drafts, _), (rolled, num_calls) = (drafts_of(each, asked) for each in pair)
        assert rolled == drafts
        assert_alike(*pair)
        # What was committed is read by the same replay, unless it is a prompt.
        assert (num_calls, graphs.num_replays) == ((2 if text == PROMPT else 1), int(num_wanted > 1))
        path = [each.token_ids[0] for each in pair[0]._trees[1].main.decided]
        text = [*text, *path[:num_agreeing], 3]
