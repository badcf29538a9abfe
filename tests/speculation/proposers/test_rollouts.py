"""Rollouts draft the same as one call per token. In Triton's interpreter, a replayed graph repeats its call."""

from __future__ import annotations

from dataclasses import replace

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
EARLY = {"temperature": 0.9, "min_tokens": 3}
KINDS = ["model", pytest.param("head", marks=pytest.mark.full), "head of few ids"]
"""The two heads differ only in their ids, so a short run uses only one of them."""
LONG_FOR_A_MODEL = pytest.mark.parametrize(
    "pair",
    [*(pytest.param(kind, marks=pytest.mark.full) for kind in ("model", "head")), "head of few ids"],
    indirect=True,
)


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(tiny_model), kernels="torch"))


@pytest.fixture
def graphs():
    return rolling.Graphs()


@pytest.fixture(params=KINDS)
def pair(request, model, graphs, monkeypatch):
    """Two proposers: the first makes a call for each token, the second uses rollouts."""
    rolling.small(monkeypatch)
    forwards = []
    for _ in range(2):
        if request.param == "model":
            forwards.append(rolling.model_forward(model))
        else:
            head = ToyHead(has_own_vocabulary=request.param != "head")
            forwards.append(rolling.toy_head_forward(head, monkeypatch))
    info = ProposerInfo(name=f"{request.param}:tiny")
    rolling.decide_by_arrays(forwards[0].sampler)
    forwards[1] = rolling.with_rollouts(forwards[1], graphs, monkeypatch)
    return [DraftModelProposer(each, info) for each in forwards]


def request_of(token_ids, num_wanted, params=HOT, *, key=1, takes_trees=False, **fields):
    options = RequestOptions(
        sampling=SamplingParams(**{"seed": 5, "max_tokens": 400} | params),
        verification_method=fields.pop("verification_method", VerificationMethod.COUPLED),
        stop_token_ids=fields.pop("stop_token_ids", ()),
    )
    start = SequenceStart(options=options, sample=0, prompt_length=len(PROMPT), takes_trees=takes_trees)
    return ProposalRequest(key, token_ids, num_wanted, start, features=ToyFeatures(token_ids), **fields)


def drafts_of(proposer, *requests):
    """Returns the complete proposals and the number of calls."""
    done, num_calls = {}, 0
    while len(done) < len(requests):
        num_calls += 1
        asked = [each for each in requests if each.sequence_id not in done]
        proposals = proposer.propose(asked)
        done |= {each.sequence_id: each for each in proposals if each.progress is Progress.DONE}
        assert num_calls < 100
    return [done[each.sequence_id] for each in requests], num_calls


def paths_of(proposer):
    """Returns the main path of each sequence, without states."""
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


def rounds(pair, graphs, params, *asked):
    """For each (num_wanted, num_agreeing), drafts, then commits the first `num_agreeing` tokens and a different one."""
    text = list(PROMPT)
    for num_wanted, num_agreeing in asked:
        graphs.num_replays = 0
        request = request_of(text, num_wanted, params, takes_trees=num_wanted > 2)
        (drafts, _), (rolled, num_calls) = (drafts_of(each, request) for each in pair)
        assert rolled == drafts
        assert_alike(*pair)
        assert num_calls == 1
        is_head = pair[1]._forward.head is not None
        assert graphs.num_replays == is_head + (num_wanted > 1)
        path = [each.token_ids[0] for each in pair[0]._trees[1].main.decided]
        text = [*text, *path[:num_agreeing], 3]


@LONG_FOR_A_MODEL
@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.full), pytest.param(HOT, id="hot")]
)
def test_tokens_siblings_confidences_and_caches_are_the_same_for_every_number(pair, graphs, params):
    rounds(pair, graphs, params, (5, 2), (1, 0), (4, 4), (2, 0), (8, 3))


@pytest.mark.parametrize("pair", ["head"], indirect=True)
def test_filters_are_applied_on_the_device(pair, graphs):
    rounds(pair, graphs, FILTERED, (3, 2), (2, 1))


@LONG_FOR_A_MODEL
def test_sequences_want_unlike_numbers_and_some_cannot_be_rolled_out(pair, graphs):
    """Sequences with penalties, with banned stop tokens or with drawn drafts need a call for each token."""
    texts = {key: [key, *PROMPT] for key in range(8)}
    wanted = {0: 5, 1: 2, 2: 1, 3: 4, 4: 3, 5: 3, 6: 3, 7: 2}
    params = {4: PENALISED, 5: EARLY}
    methods = {6: VerificationMethod.REJECTION}

    def asked():
        return [
            request_of(
                text,
                wanted[key],
                params.get(key, HOT),
                key=key,
                verification_method=methods.get(key, VerificationMethod.COUPLED),
                stop_token_ids=(7,),
            )
            for key, text in texts.items()
        ]

    for _ in range(2):
        (drafts, num_calls), (rolled, num_rolled_calls) = (drafts_of(each, *asked()) for each in pair)
        assert [each.tree.token_ids for each in rolled] == [each.tree.token_ids for each in drafts]
        assert_alike(*pair)
        assert num_rolled_calls <= num_calls
        texts = {
            key: [*text, *draft.tree.token_ids[:2], 3] for (key, text), draft in zip(texts.items(), drafts, strict=True)
        }
        wanted |= {0: 2, 2: 4}
    assert graphs.num_replays >= 2


@LONG_FOR_A_MODEL
def test_a_draft_ends_where_it_would_token_by_token(pair, graphs):
    """It ends at a stop token, where confidence gets too low, and at the maximum length."""
    (whole, _), _ = (drafts_of(each, request_of(PROMPT, 6)) for each in pair)
    tokens = whole[0].tree.token_ids
    tree = pair[0]._trees[1]
    reach = tree.main.decided[0].confidence * tree.main.decided[1].confidence
    fields = ({"stop_token_ids": (tokens[2],)}, {"min_reach": reach * 1.01}, {"params": HOT | {"max_tokens": 4}})
    for key, field in enumerate(fields, start=2):
        (drafts, _), (rolled, _) = (drafts_of(each, request_of(PROMPT, 6, key=key, **field)) for each in pair)
        assert rolled == drafts
        assert len(rolled[0].tree) < 6 or "min_reach" in field
        assert_alike(*pair)


def test_where_the_window_ends_or_blocks_run_out_it_goes_on_token_by_token(pair, graphs):
    """The last token of a text fills its block, so the next one needs another block."""
    for each in pair:
        each._forward = replace(each._forward, max_model_len=35)
    for key, (length, num_wanted) in enumerate(((30, 5), (33, 2), (34, 1))):
        text = [(7 * index) % 300 for index in range(length)]
        (drafts, _), (rolled, _) = (drafts_of(each, request_of(text, num_wanted, key=key)) for each in pair)
        assert rolled == drafts
        assert len(rolled[0].tree) == num_wanted
        assert_alike(*pair)
    for each in pair:
        for key in range(3):
            each.forget(key)
        pool = each._forward.pool
        pool.allocate(pool.num_free_blocks - 1)
    graphs.num_replays = 0
    text = [(7 * index) % 300 for index in range(12)]
    (drafts, _), (rolled, num_calls) = (drafts_of(each, request_of(text, 8, key=9)) for each in pair)
    assert rolled == drafts
    assert 0 < len(rolled[0].tree) < 8
    assert graphs.num_replays <= num_calls * (pair[1]._forward.head is not None)  # a head's steps


@LONG_FOR_A_MODEL
def test_a_sequence_may_go_between_calls_and_look_ahead_goes_on_from_a_rollout(pair, graphs):
    fields = {"max_alternatives": 2}
    for each in pair:
        drafts_of(each, request_of(PROMPT, 4, key=1), request_of([9, *PROMPT], 5, key=2))
        each.forget(2)
        drafts_of(each, request_of(PROMPT, 4, key=3, **fields))
        for _ in range(30):
            (proposal,) = each.propose([request_of(PROMPT, 4, key=3, looks_ahead=True, **fields)])
            check_proposer(each)
            if not proposal.has_more:
                break
    mains = [[decided.token_ids for decided in each._trees[3].main.decided] for each in pair]
    assert len(mains[0]) > 4
    assert mains[0] == mains[1]
    for each in pair:
        each.forget(1)
        each.forget(3)
        assert each._forward.pool.num_free_blocks == each._forward.pool.num_blocks
