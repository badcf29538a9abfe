"""A packed head drafts in the kernels what the sampler decides token by token from rows of all the target's logits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels import decoder
from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
from outrider.request import SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import MAX_PROPOSAL_TOKENS
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward, confidences_of
from tests.speculation.asking import start_of
from tests.support.native_kernels import native_kernels
from tests.support.pool_integrity import check_proposer
from tests.support.random_eagle3 import make_random_eagle3

VOCAB_SIZE, WIDTH, PROMPT = 320, 64, [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19]
BY_ID = 3 * np.random.default_rng(5).standard_normal((VOCAB_SIZE, WIDTH), dtype=np.float32)
PARAMS = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 9, "top_p": 0.7, "min_p": 0.02},
    "nucleus": {"temperature": 1.5, "top_p": 0.4},
    "all kept": {"temperature": 1.0, "top_k": 200},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy, penalised": {"temperature": 0.0, "frequency_penalty": 1.9},
    "biased": {"temperature": 1.0, "logit_bias": tuple((token_id, 4.0) for token_id in range(0, VOCAB_SIZE, 9))},
    "not yet": {"temperature": 0.5, "min_tokens": 3},
}


class TokenByToken(HeadForward):
    """The reference: each forward decides one token of a path by the sampler, from logits of all the target's ids."""

    __slots__ = ()
    max_tokens = 1

    def _draft(self, steps, batch, parts, rows):
        deciding = [row for row in rows if row.num_decisions]
        made = []

        def logits_only(batch, features, paths, **_):
            drafts, logits = type(steps).draft(steps, batch, features, paths, wants_logits=True)
            made.append((drafts, logits))
            return drafts, logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "draft", logits_only, raising=False)
            alone = [row._replace(max_tokens=1, wants_distribution=True) for row in rows]
            HeadForward._draft(self, steps, batch, parts, alone)
        ((drafts, logits),) = made
        params = [row.sampling.params for row in deciding]
        temperatures = np.array([[1.0 if each.is_greedy else each.temperature] for each in params], dtype=np.float32)
        return self._decide(
            logits,
            rows,
            confidences=confidences_of(logits, temperatures, steps._target_ids),
            states=np.stack([each.state for each in drafts]),
        )


class KnownFeatures:
    def __init__(self, token_ids):
        self._rows = torch.from_numpy(BY_ID[np.asarray(token_ids[:-1])]).to(torch.bfloat16)

    def __len__(self):
        return len(self._rows)

    def read(self, start, end):
        return self._rows[start:end].view(torch.uint16).numpy()


@pytest.fixture(scope="module")
def kernels():
    found = native_kernels()
    if found is None:
        pytest.skip("no native kernels were built")
    return found


@pytest.fixture(params=["its own ids", "unsorted ids", "the target's ids"])
def pair(request, kernels, tmp_path):
    """Two proposers: one decides token by token, the other drafts in the kernels."""
    num_ids = VOCAB_SIZE if request.param == "the target's ids" else 100
    folder, target = make_random_eagle3(tmp_path, draft_vocab_size=num_ids, num_kv_heads=1)
    known = np.ones(VOCAB_SIZE, dtype=np.bool_)
    known[[20, 21, 22, *range(310, VOCAB_SIZE)]] = False
    made = []
    for kind in (TokenByToken, HeadForward):
        head = open_head(folder, Target.open(target), torch.device("cpu"), torch.bfloat16)
        if request.param == "unsorted ids":
            order = torch.randperm(num_ids, generator=torch.Generator().manual_seed(1))
            head.target_ids = head.target_ids[order]
        forward = kind.of(head, num_cached_tokens=4096, known_token_ids=known, kernels=kernels)
        made.append(DraftModelProposer(forward, ProposerInfo(name="eagle3:random")))
    return made


def request_of(text, num_wanted, *, key=1, params="hot", min_reach=0.0, method=VerificationMethod.COUPLED, **fields):
    sampling = SamplingParams(**{"seed": 5 + key, "max_tokens": 400} | PARAMS[params])
    start = start_of(
        sampling, takes_trees=key % 2 == 0, verification_method=method, stop_token_ids=fields.pop("stops", (7, 250))
    )
    return ProposalRequest(key, text, num_wanted, start, features=KnownFeatures(text), min_reach=min_reach, **fields)


def drafts_of(proposer, *requests):
    """Returns the complete proposals and the number of calls."""
    done, num_calls = {}, 0
    while len(done) < len(requests):
        num_calls += 1
        asked = [each for each in requests if each.sequence_id not in done]
        proposals = proposer.propose(asked)
        check_proposer(proposer)
        done |= {each.sequence_id: each for each in proposals if each.progress is Progress.DONE}
        assert num_calls < 100
    return [done[each.sequence_id] for each in requests], num_calls


def assert_alike(one, other):
    """Checks that all main paths have the same tokens, runners-up, states and KV, and about the same confidences."""
    assert one._trees.keys() == other._trees.keys()
    for key, tree in one._trees.items():
        found, expected = other._trees[key].main, tree.main
        assert [each.token_ids for each in found.decided] == [each.token_ids for each in expected.decided]
        assert found.kv.num_tokens == expected.kv.num_tokens
        for ours, theirs in zip(found.decided, expected.decided, strict=True):
            assert ours.confidence == pytest.approx(theirs.confidence, rel=1e-5)
            assert np.array_equal(ours.state, theirs.state)


@pytest.mark.parametrize("num_sequences", [1, 3, 8])
@pytest.mark.parametrize("params", PARAMS)
def test_drafts_are_the_same_token_by_token_and_in_one_call(pair, params, num_sequences):
    texts = [
        [(13 * key + at) % VOCAB_SIZE if at > 20 else (PROMPT * 3)[at] for at in range(12 + key)] for key in range(8)
    ]
    for num_wanted, num_agreeing in ((4, 2), (1, 0), (7, 5)):
        requests = [
            request_of(text, max(1, num_wanted - key % 3), key=key, params=params)
            for key, text in enumerate(texts[:num_sequences])
        ]
        (expected, _), (found, num_calls) = (drafts_of(each, *requests) for each in pair)
        assert [each.tree.token_ids for each in found] == [each.tree.token_ids for each in expected]
        assert num_calls == 1
        assert_alike(*pair)
        paths = [pair[0]._trees[key].main.token_ids for key in range(num_sequences)]
        texts = [[*text, *path[:num_agreeing], 3] for text, path in zip(texts, paths, strict=False)]


def test_all_kinds_in_one_batch_are_drafted_like_each_alone(pair):
    requests = [request_of([key, *PROMPT], 5, key=key, params=each) for key, each in enumerate(PARAMS)]
    found, _ = drafts_of(pair[1], *requests)
    for request, each in zip(requests, found, strict=True):
        (alone,), _ = drafts_of(pair[1], request._replace(sequence_id=100 + request.sequence_id))
        assert alone.tree.token_ids == each.tree.token_ids


def test_a_draft_ends_where_it_would_token_by_token(pair):
    """It ends at a stop token, where confidence gets too low, and at the maximum length."""
    drafts_of(pair[0], request_of(PROMPT, 6, stops=()))
    decided = pair[0]._trees[1].main.decided
    reach = decided[0].confidence * decided[1].confidence * 1.01
    pair[0].forget(1)
    stops = request_of(PROMPT, 6, key=3, stops=(decided[0].token_ids[0],))
    for request in (request_of(PROMPT, 6, key=1, min_reach=reach), stops, request_of(PROMPT, 16, key=5, stops=())):
        (expected, _), (found, num_calls) = (drafts_of(each, request) for each in pair)
        assert found == expected
        assert num_calls == 1
        assert_alike(*pair)
    for each in pair:
        each._forward = replace(each._forward, max_model_len=len(PROMPT) + 3)
    (expected, _), (found, _) = (drafts_of(each, request_of(PROMPT, 3, key=7)) for each in pair)
    assert found == expected


def test_the_loop_ends_with_the_draft(pair):
    """Nothing is decided, and so nothing is fed, after a stop token or an unlikely one."""
    steps, made = pair[1]._forward.steps, []
    draft = steps.draft
    steps.draft = lambda *args, **options: made.append(draft(*args, **options)) or made[-1]
    drafts_of(pair[1], request_of(PROMPT, 6, stops=()))
    token_ids = pair[1]._trees[1].main.token_ids
    drafts_of(pair[1], request_of([9, *PROMPT], 6, key=2, min_reach=1.01, stops=()))
    pair[1].forget(1)
    drafts_of(pair[1], request_of(PROMPT, 6, stops=(token_ids[1],)))
    num_until_stop = 1 + token_ids.index(token_ids[1])
    assert [1 + len(drafts[0].following) for drafts, _ in made] == [6, 1, num_until_stop]


def test_only_a_short_draft_keeps_the_interpreters_lock(pair, monkeypatch):
    step = pair[1]._forward.steps._step
    monkeypatch.setattr(step, "_functions", None)
    (short,), _ = drafts_of(pair[1], request_of(PROMPT, 6))
    monkeypatch.undo()
    monkeypatch.setattr(step, "_short_functions", None)
    monkeypatch.setattr(decoder, "_SHORT_DRAFT", 0)
    pair[1].forget(1)
    (long,), _ = drafts_of(pair[1], request_of(PROMPT, 6))
    assert long == short


def test_the_loop_knows_how_likely_a_begun_path_is(pair):
    """A path that goes on in another call ends where it would in one call, and no token is decided in vain."""
    drafts_of(pair[1], request_of(PROMPT, 6, stops=()))
    decided = pair[1]._trees[1].main.decided
    reach = math.prod(each.confidence for each in decided[:4]) * 1.01
    pair[1].forget(1)
    drafts_of(pair[1], request_of(PROMPT, 2, stops=()))
    steps, made = pair[1]._forward.steps, []
    draft = steps.draft
    steps.draft = lambda *args, **options: made.append(draft(*args, **options)) or made[-1]
    drafts_of(pair[1], request_of(PROMPT, 6, stops=(), min_reach=reach))
    num_tokens = next(num for num in range(1, 7) if math.prod(each.confidence for each in decided[:num]) < reach)
    assert len(pair[1]._trees[1].main) == num_tokens > 2
    assert 1 + len(made[0][0][0].following) == num_tokens - 2


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_drawn_drafts_get_one_token_a_call_and_the_same_distributions(pair, num_sequences):
    requests = [
        request_of([key, *PROMPT], 4, key=key, params="filtered", method=VerificationMethod.REJECTION)
        for key in range(num_sequences)
    ]
    (expected, _), (found, num_calls) = (drafts_of(each, *requests) for each in pair)
    assert [each.tree for each in found] == [each.tree for each in expected]
    assert all(each.tree.distributions for each in found)
    assert num_calls == 4


def test_look_ahead_goes_on_from_a_draft(pair):
    for each in pair:
        drafts_of(each, request_of(PROMPT, 4, max_alternatives=2))
        for _ in range(30):
            (proposal,) = each.propose([request_of(PROMPT, 4, looks_ahead=True, max_alternatives=2)])
            check_proposer(each)
            if not proposal.has_more:
                break
    branches = [{tuple(path.token_ids) for path in each._trees[1].paths} for each in pair]
    assert max(map(len, branches[1])) > MAX_PROPOSAL_TOKENS // 4
    text = [*PROMPT, *pair[0]._trees[1].main.token_ids[:2]]
    (expected, _), (found, _) = (drafts_of(each, request_of(text, 4)) for each in pair)
    assert found == expected
