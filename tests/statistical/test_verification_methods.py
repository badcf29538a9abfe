"""Verification methods against float64: what is committed has the target's distribution, whatever was drafted.

The negative controls are well-known mistakes, each built in by a patch; the check must notice them.
Seeds are fixed, so a test that passes always passes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.arrivals import RaceKey
from outrider.request import Constraint, ConstraintKind, RequestOptions, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.suffix import SuffixProposer
from outrider.speculation.token_distribution import MAX_DISTRIBUTION_IDS, TokenDistribution
from outrider.speculation.verify import rejection
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.statistical.chi_square import PASS, chi_square_z, large_logits, probabilities, small_logits, worst_z
from tests.statistical.samplers import sampler_of
from tests.support.native_kernels import native_kernels
from tests.support.verifying import verify_now

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_DRAFT = 4
NUM_STREAMS = 64
SETTINGS = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20, "min_p": 0.02}]
EXACT = [VerificationMethod.COUPLED, VerificationMethod.REJECTION]


class ModelDrafter:
    """A drafter that draws, by exponential races, from the likeliest ids of a noisy copy of the target's logits."""

    def __init__(self, logits, *, noise=1.0, most=MAX_DISTRIBUTION_IDS, **settings):
        drafted = logits + np.random.default_rng(5).standard_normal(len(logits)) * noise
        params = params_of(settings)
        self.params = replace(params, top_k=min(params.top_k or most, most)) if most else params
        self.logits = drafted.astype(np.float32)
        self.sampler = sampler_of(logits, native_kernels())

    def draw(self, sample, num_positions):
        """Returns the tokens of a stream's first positions, and the distribution from which they were drawn."""
        state = self.sampler.start(self.params, sample=sample, prompt_token_ids=[])
        rows = [SampleRows(state, 0, (0,) * (num_positions - 1))]
        tokens = self.sampler.sample(np.tile(self.logits, (num_positions, 1)), rows).token_ids
        values = self.sampler.distribution(self.logits[None], [SampleRows(state, 0)])[0]
        probs = np.exp(values - values.max())
        probs /= probs.sum()
        ids = np.argsort(-probs, kind="stable")[:MAX_DISTRIBUTION_IDS].tolist()
        kept = [token_id for token_id in ids if probs[token_id] > 0]
        return tokens, TokenDistribution(tuple(kept), tuple(probs[kept].tolist()))


class LookupDrafter:
    """A drafter without probabilities, which proposes likely tokens and arbitrary ones."""

    def __init__(self, logits, **_settings):
        self.likely = np.argsort(-logits)[:5].tolist()

    def draw(self, sample, num_positions):
        return [(self.likely[t % 5] if t % 3 else (7 * t + sample) % 100) for t in range(num_positions)], None


def params_of(settings):
    return SamplingParams(**{"seed": 77, "max_tokens": 1 << 20, **settings})


def generate(
    method, logits, drafter, *, num_tokens=100, num_streams=NUM_STREAMS, send=lambda tokens, q: len(tokens), **settings
):
    """Returns tokens of many streams with equal logits everywhere, [num_streams, num_tokens], and the acceptance rate.

    Steps verify 0 to 4 draft tokens. Later steps use the rest of a draft, as with a real drafter.
    `send(token_ids, distribution)` returns how many of the drafted tokens the drafter sends.
    """
    sampler = sampler_of(logits, native_kernels())
    verifier = RequestVerifier(sampler)
    row = logits.astype(np.float32)
    states = [sampler.start(params_of(settings), sample=i, prompt_token_ids=[]) for i in range(num_streams)]
    drawn = [drafter.draw(i, num_tokens + MAX_DRAFT) for i in range(num_streams)]
    texts: list[list[int]] = [[] for _ in range(num_streams)]
    num_drafted = num_accepted = step = 0
    while min(map(len, texts)) < num_tokens:
        drafts = []
        for i, (text, (tokens, q)) in enumerate(zip(texts, drawn, strict=True)):
            position = min(len(text), num_tokens)
            draft = tuple(tokens[position : position + (step + i) % (MAX_DRAFT + 1)])
            draft = draft[: send(draft, q)]
            distributions = () if q is None else (q,) * len(draft)
            drafts.append(DraftRows(SampleRows(states[i], position, draft), distributions, method))
        step += 1
        verified = verify_now(verifier, np.tile(row, (sum(draft.rows.num_rows for draft in drafts), 1)), drafts)
        for text, draft, outcome in zip(texts, drafts, verified, strict=True):
            text.extend(outcome.token_ids if len(text) < num_tokens else ())
            num_drafted += len(draft.draft_token_ids)
            num_accepted += outcome.num_accepted
    return np.asarray([text[:num_tokens] for text in texts]), num_accepted / num_drafted


@pytest.mark.parametrize("make_drafter", [ModelDrafter, LookupDrafter])
@pytest.mark.parametrize(
    ("method", "settings"),  # coupled sampling has its own tests
    [(VerificationMethod.COUPLED, {}), *((VerificationMethod.REJECTION, each) for each in SETTINGS)],
    ids=str,
)
def test_exact_methods_commit_the_targets_distribution(method, settings, make_drafter, is_full):
    logits = small_logits()
    num_tokens = 500 if is_full else 60
    tokens, _ = generate(method, logits, make_drafter(logits, **settings), num_tokens=num_tokens, **settings)
    assert worst_z(tokens, probabilities_of(logits, settings)) < PASS


def test_large_vocabulary(is_full):
    logits = large_logits()
    num_tokens = 100 if is_full else 15
    tokens, _ = generate(
        VerificationMethod.REJECTION, logits, ModelDrafter(logits), num_tokens=num_tokens, num_streams=16
    )
    assert worst_z(tokens, probabilities(logits)) < PASS


def probabilities_of(logits, settings):
    """Does what `probabilities` does, with min_p as well."""
    settings = dict(settings)
    min_p = settings.pop("min_p", 0.0)
    probs = probabilities(logits, **settings)
    probs[probs < min_p * probs.max()] = 0.0
    return probs / probs.sum()


ALLOWED = tuple(range(0, 100, 3))
MASKED = {"constraint": Constraint(ConstraintKind.CHOICE, options=tuple(map(str, ALLOWED)))}


def masked_probabilities():
    logits = np.full(100, -np.inf)
    logits[list(ALLOWED)] = small_logits()[list(ALLOWED)]
    return probabilities(logits)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("of_drafter", [MASKED, {}], ids=["with the drafter's knowledge", "without"])
def test_a_constraint_cuts_the_distribution_and_biases_nothing(method, of_drafter, is_full):
    logits, num_tokens = small_logits(), 500 if is_full else 60
    drafter = ModelDrafter(logits, **of_drafter)
    tokens, acceptance = generate(method, logits, drafter, num_tokens=num_tokens, **MASKED)
    assert worst_z(tokens, masked_probabilities()) < PASS
    assert acceptance > (0.25 if of_drafter else 0.02)
    if method is VerificationMethod.COUPLED:
        assert (tokens == generate(method, logits, LookupDrafter(logits), num_tokens=num_tokens, **MASKED)[0]).all()


def test_rejection_accepts_more_than_coupled_sampling():
    logits = small_logits()
    acceptance = {method: generate(method, logits, ModelDrafter(logits, noise=0.6))[1] for method in EXACT}
    assert acceptance[VerificationMethod.REJECTION] > acceptance[VerificationMethod.COUPLED]


def replayed_z(*, num_replays=3, num_streams=1500):
    """Returns chi_square_z of the first tokens after the prompts, if requests are repeated with their seeds and a
    lookup remembers outputs.
    """
    logits = np.full(100, -30.0)
    probs = np.asarray([0.6, 0.3, 0.1])  # of tokens 0 to 2
    logits[:3] = np.log(probs)
    sampler, ids = sampler_of(logits, native_kernels()), itertools.count()
    proposer = SuffixProposer(remembered_tokens=num_streams)  # one token per stream: those of the previous replay
    starts = [
        SequenceStart(
            options=RequestOptions(sampling=params_of({}), verification_method=VerificationMethod.REJECTION),
            sample=i,
            prompt_length=2,
        )
        for i in range(num_streams)
    ]
    for _ in range(num_replays):
        drafts, texts = [], []
        for start in starts:
            prompt = [10 + start.sample // 80, 10 + start.sample % 80]
            request = ProposalRequest(next(ids), prompt, 1, start)
            (proposal,) = proposer.propose([request])
            state = sampler.start(start.options.sampling, sample=start.sample, prompt_token_ids=prompt)
            drafts.append(DraftRows(SampleRows(state, 2, proposal.tree.token_ids), (), VerificationMethod.REJECTION))
            texts.append(request)
        rows = np.tile(logits.astype(np.float32), (sum(draft.rows.num_rows for draft in drafts), 1))
        tokens = [outcome.token_ids[0] for outcome in verify_now(RequestVerifier(sampler), rows, drafts)]
        for request, token_id in zip(texts, tokens, strict=True):
            proposer.propose([request._replace(token_ids=[*request.token_ids, token_id], num_wanted=0)])
            proposer.forget(request.sequence_id)
    return chi_square_z(np.asarray(tokens), probs)


def test_a_lookup_that_remembers_outputs_does_not_bias_requests_that_are_sent_again():
    assert replayed_z() < PASS


# Negative controls


def test_drafts_that_are_cut_by_a_grammar_are_noticed(monkeypatch):
    """Mistake: the draft affects which random numbers decide its position."""

    def num_allowed(token_ids, _q):
        return next((i for i, token_id in enumerate(token_ids) if token_id not in ALLOWED), len(token_ids))

    draw = ModelDrafter.draw  # with its own random numbers; with the target's, too few cut drafts would matter
    monkeypatch.setattr(ModelDrafter, "draw", lambda self, sample, num: draw(self, sample + NUM_STREAMS, num))
    logits = small_logits()
    for options in ({}, {"send": num_allowed}):
        tokens, _ = generate(VerificationMethod.REJECTION, logits, ModelDrafter(logits), **options, **MASKED)
        assert (worst_z(tokens, masked_probabilities()) < PASS) == (not options)


def test_a_memory_of_what_the_same_luck_decided_is_noticed(monkeypatch):
    """Mistake: a lookup repeats what rejection sampling decided for the same request."""
    monkeypatch.setattr(SequenceStart, "wants_distributions", False)
    assert replayed_z() > PASS


def test_typical_acceptance_is_lossy_and_accepts_more():
    """Because of this, the method is called lossy everywhere."""
    logits = small_logits()
    tokens, acceptance = generate(VerificationMethod.TYPICAL, logits, ModelDrafter(logits))
    assert worst_z(tokens, probabilities(logits)) > PASS
    assert acceptance > generate(VerificationMethod.COUPLED, logits, ModelDrafter(logits))[1]


def rejection_z(logits, drafter=None, **options):
    tokens, _ = generate(VerificationMethod.REJECTION, logits, drafter or ModelDrafter(logits, noise=2.0), **options)
    return worst_z(tokens, probabilities(logits))


def test_recovering_from_the_whole_target_is_noticed(monkeypatch):
    """Mistake: after a rejection a token is drawn from p instead of max(p - q, 0)."""
    recover = rejection._recover

    def recover_from_target(target, drafted, luck):
        ids, weights, totals = drafted
        return recover(target, (ids, np.zeros_like(weights), totals), luck)

    monkeypatch.setattr(rejection, "_recover", recover_from_target)
    assert rejection_z(small_logits()) > PASS


def test_shared_luck_for_draft_and_recovered_token_is_noticed(monkeypatch):
    """Mistake: the recovered token is decided by the same race by which the drafter has drawn the draft token."""
    logits = small_logits()
    sampler = sampler_of(logits, native_kernels())
    accept = rejection._accept

    def recover_by_race(masses, drafts, num_drafts):
        num_accepted, recovered = accept(masses, drafts, num_drafts)
        firsts = np.cumsum([0, *num_drafts[:-1]])
        rejected = [place for place, num in enumerate(num_accepted.tolist()) if num < num_drafts[place]]
        if not rejected:
            return num_accepted, recovered
        left = masses[[firsts[place] + num_accepted[place] for place in rejected]].astype(np.float64)
        rows = []
        for row, place in zip(left, rejected, strict=True):
            draft, index = drafts[place], int(num_accepted[place])
            q = draft.distributions[index]
            row[list(q.token_ids)] -= np.asarray(q.probabilities) * row.sum()
            rows.append(SampleRows(draft.rows.state, draft.rows.position + index))
        with np.errstate(divide="ignore"):
            recovered[rejected] = sampler.decide(np.log(left.clip(min=0.0)).astype(np.float32), rows)
        return num_accepted, recovered

    monkeypatch.setattr(rejection, "_accept", recover_by_race)
    assert rejection_z(logits) > PASS


def test_probabilities_that_were_not_drawn_from_are_noticed():
    """Mistake: the drafter draws from all of q, but sends its likeliest ids, renormalised."""
    logits = small_logits()
    assert rejection_z(logits, ModelDrafter(logits, noise=2.0, most=0)) > PASS


def test_draft_tokens_dropped_for_being_unlikely_are_noticed():
    """Mistake: a draft ends where the drafter's own probability of its token is low."""

    def send_until_unlikely(token_ids, q):
        likely = [q.probability_of(token_id) > 0.1 for token_id in token_ids]
        return likely.index(False) if False in likely else len(token_ids)

    drafter = ModelDrafter(small_logits(), noise=0.5, seed=78)  # with random numbers of its own, which is exact too
    assert rejection_z(small_logits(), drafter) < PASS
    assert rejection_z(small_logits(), drafter, send=send_until_unlikely) > PASS


def test_luck_used_for_two_positions_is_noticed(monkeypatch):
    """Mistake: neighbours share their random numbers. Every token alone may be right, pairs are not."""
    words = RaceKey.words
    monkeypatch.setattr(RaceKey, "words", lambda key, purpose: words(key._replace(position=key.position // 2), purpose))
    assert rejection_z(small_logits()) > PASS
