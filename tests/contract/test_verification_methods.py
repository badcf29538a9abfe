"""The promises of every verification method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampler import SampleRows
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams, VerificationMethod
from outrider.speculation.token_distribution import TokenDistribution, certain
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.support.sampler_kinds import SamplerOfKind
from tests.support.verifying import verify_now

VOCAB_SIZE, HOLE = 130, 101
COUPLED, REJECTION, TYPICAL = VerificationMethod


@pytest.fixture
def sampler(sampler_kind):
    return SamplerOfKind(sampler_kind, vocab_size=VOCAB_SIZE, known_token_ids=np.arange(VOCAB_SIZE) != HOLE)


@pytest.fixture(params=VerificationMethod)
def method(request):
    return request.param


def logits_of(num_rows, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32) * 2)


def state_of(sampler, *, sample=0, logprobs=None, stop_token_ids=(), **settings):
    params = SamplingParams(**{"seed": 9, "max_tokens": 100, **settings})
    return sampler.start(
        params, sample=sample, prompt_token_ids=[1, 2], logprobs=logprobs, stop_token_ids=stop_token_ids
    )


def verify(sampler, logits, *drafts):
    return verify_now(RequestVerifier(sampler), logits, drafts)


def test_without_a_draft_the_race_decides(sampler, method):
    logits = logits_of(3)
    rows = [SampleRows(state_of(sampler, sample=i), 20 + i) for i in range(3)]
    verified = verify(sampler, logits, *(DraftRows(row, (), method) for row in rows))
    assert [outcome.token_ids for outcome in verified] == [(token,) for token in sampler.sample(logits, rows).token_ids]


def test_at_temperature_0_all_methods_are_the_same(sampler, method):
    logits = logits_of(3)
    best = logits.index_fill(1, torch.tensor([HOLE]), -torch.inf).argmax(dim=1).tolist()
    for draft, committed in (((best[0], best[1]), tuple(best)), ((best[0], 3), (best[0], best[1]))):
        rows = SampleRows(state_of(sampler, temperature=0.0), 20, draft)
        assert verify(sampler, logits, DraftRows(rows, (), method))[0].token_ids == committed


def test_what_the_target_is_sure_of_is_accepted_whole(sampler, method):
    logits = torch.full((4, VOCAB_SIZE), -50.0)
    logits[range(4), [5, 6, 7, 8]] = 50.0
    rows = SampleRows(state_of(sampler), 20, (5, 6, 7))
    outcome = verify(sampler, logits, DraftRows(rows, (), method))[0]
    assert (outcome.token_ids, outcome.num_accepted) == ((5, 6, 7, 8), 3)


@pytest.mark.parametrize("draft", [(HOLE,), (VOCAB_SIZE + 70,), (4,)], ids=["hole", "beyond", "filtered"])
def test_a_token_that_cannot_be_drawn_is_never_accepted(sampler, method, draft):
    logits = logits_of(2)
    logits[0, 4] = logits[0].min() - 1.0
    rows = SampleRows(state_of(sampler, top_k=50), 20, draft)
    outcome = verify(sampler, logits, DraftRows(rows, (certain(draft[0]),), method))[0]
    assert outcome.num_accepted == 0
    assert outcome.token_ids != draft


def test_rows_after_draft_tokens_count_them_as_generated(sampler, method):
    logits = torch.full((2, VOCAB_SIZE), -50.0)
    logits[range(2), [5, 6]] = 50.0
    logits[1, 7] = 0.0
    for min_tokens, last in ((1, 6), (2, 7)):  # the stop token 6 is banned before `min_tokens`
        state = state_of(sampler, min_tokens=min_tokens, stop_token_ids=[6])
        outcome = verify(sampler, logits, DraftRows(SampleRows(state, 20, (5,)), (), method))[0]
        assert outcome.token_ids == (5, last)


def test_sequences_do_not_depend_on_their_batch(sampler):
    logits = logits_of(9)
    spread = TokenDistribution((7, 8, 9), (0.5, 0.25, 0.25))
    drafts = [
        DraftRows(SampleRows(state_of(sampler, sample=0), 20, (7, 8)), (spread, spread), REJECTION),
        DraftRows(SampleRows(state_of(sampler, sample=1), 31, (7,)), (), COUPLED),
        DraftRows(SampleRows(state_of(sampler, sample=2), 40, ()), (), REJECTION),
        DraftRows(SampleRows(state_of(sampler, sample=3, top_p=0.8), 50, (9, 7)), (), TYPICAL),
    ]
    together = verify(sampler, logits, *drafts)
    ends = np.cumsum([draft.rows.num_rows for draft in drafts])
    assert ends[-1] == len(logits)
    for draft, end, outcome in zip(drafts, ends, together, strict=True):
        assert verify(sampler, logits[end - draft.rows.num_rows : end], draft) == [outcome]
    assert verify(sampler, logits) == []


@pytest.mark.parametrize("mode", LogprobsMode)
def test_committed_tokens_have_logprobs(sampler, method, mode):
    logits = logits_of(3)
    token = int(logits[0].argmax())
    rows = SampleRows(state_of(sampler, logprobs=LogprobsRequest(num_top=2, mode=mode)), 20, (token, 3))
    plain = SampleRows(state_of(sampler), 30)
    outcome, other = verify(
        sampler, torch.cat([logits, logits[:1]]), DraftRows(rows, (), method), DraftRows(plain, (), method)
    )
    assert [each.token_id for each in outcome.logprobs] == list(outcome.token_ids)
    assert not any(other.logprobs)
    expected = torch.log_softmax(logits[0, :].double(), dim=0) if mode is LogprobsMode.MODEL else None
    if expected is not None:
        assert outcome.logprobs[0].logprob == pytest.approx(float(expected[outcome.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_rows_without_a_distribution_are_decided_by_the_race(sampler, method, value):
    logits = logits_of(2)
    logits[0, : (VOCAB_SIZE if value == float("-inf") else 3)] = value
    (decided, _) = sampler.sample(logits, [SampleRows(state_of(sampler), 20, (5,))]).token_ids
    for draft in (decided, decided + 1):
        outcome = verify(sampler, logits, DraftRows(SampleRows(state_of(sampler), 20, (draft,)), (), method))[0]
        assert outcome.num_accepted == (draft == decided)
        assert outcome.token_ids[0] == decided


def test_only_typical_acceptance_is_lossy_and_is_called_so():
    assert [each.label for each in VerificationMethod] == ["coupled", "rejection", "typical (lossy)"]
    assert [each for each in VerificationMethod if each.is_lossy] == [TYPICAL]


@pytest.mark.parametrize(
    "distribution",
    [
        TokenDistribution((1, 2), (0.5, 0.5)),  # not the token
        TokenDistribution((5, 5), (0.5, 0.5)),
        TokenDistribution((5, 6), (1.0,)),
        TokenDistribution((5,), (float("nan"),)),
        TokenDistribution((5,), (0.0,)),
        TokenDistribution((5, 6), (1.5, -0.5)),
        TokenDistribution((5, 6), (0.0, 1.0)),
        TokenDistribution((5, 6), (0.2, 0.2)),
        TokenDistribution(tuple(range(40)), (1 / 40,) * 40),
        TokenDistribution((), ()),
    ],
    ids=str,
)
def test_distributions_that_cannot_be_true_are_recognised(distribution):
    assert not distribution.can_have_drawn(5)
    assert certain(5).can_have_drawn(5)
