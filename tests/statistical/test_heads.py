"""Heads of every form behind every verification method: what is committed has the target's distribution.

Random heads draft for a target that has the same logits at every position, from random features. What matters is that
a draft contains the tokens that the head has drawn and the probabilities from which it has drawn them. The negative
controls are typical mistakes, built in by a patch. Seeds are fixed, so a test that passes always passes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from outrider.engine.sampler import SampleRows
from outrider.heads.checkpoint import Target
from outrider.heads.module_steps import ModuleHeadSteps
from outrider.heads.open import open_head
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_forward import DraftForward
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.statistical.chi_square import PASS, probabilities, worst_z
from tests.statistical.samplers import sampler_of
from tests.support.head_files import HEADS, WITH_OWN_IDS, make_head
from tests.support.native_kernels import native_kernels
from tests.support.tiny_model import make_tiny_model
from tests.support.verifying import verify_now

pytestmark = pytest.mark.usefixtures("one_thread")

COUPLED, REJECTION = VerificationMethod.COUPLED, VerificationMethod.REJECTION
VOCAB_SIZE = 320
MAX_DRAFT = 4
NUM_STREAMS = 64
PROMPT_LENGTH = 3


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE)


@pytest.fixture
def make_proposer(target_path, tmp_path):
    names = itertools.count()

    def make(form, *, in_torch=False):
        """By default, forward and sampler use native kernels if there are any."""
        head = open_head(
            make_head(form, tmp_path / f"{form}-{next(names)}", target_path),
            Target.open(target_path),
            torch.device("cpu"),
            torch.float32,
        )
        known = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        forward = HeadForward.of(
            head,
            num_cached_tokens=NUM_STREAMS * 256,
            known_token_ids=known,
            device="cpu",
            kernels=None if in_torch else native_kernels(),
        )
        return DraftModelProposer(forward, ProposerInfo(name=f"{form}:random"))

    return make


def target_logits():
    return np.random.default_rng(0).standard_normal(VOCAB_SIZE) * 1.5


class RandomFeatures:
    """The features of all tokens of one text except the newest."""

    def __init__(self, table, num_tokens):
        self._table, self._num_tokens = table, num_tokens

    def __len__(self):
        return self._num_tokens - 1

    def read(self, start, end):
        return self._table[start:end]


def drafts_of(proposer, requests):
    """Asks until all proposals are done, and returns them in the order of `requests`."""
    found = {}
    for _ in range(100):
        asked = [request for request in requests if request.sequence_id not in found]
        if not asked:
            return [found[request.sequence_id] for request in requests]
        for proposal in proposer.propose(asked):
            if proposal.progress is Progress.DONE:
                found[proposal.sequence_id] = proposal.tree
    raise AssertionError("never done")


def generate(proposer, method, *, num_tokens=60, **settings):
    """Returns tokens of many streams, [NUM_STREAMS, num_tokens], and the share of accepted draft tokens."""
    logits = target_logits()
    sampler = sampler_of(logits, native_kernels())
    verifier, row = RequestVerifier(sampler), logits.astype(np.float32)
    params = SamplingParams(**{"seed": 77, "max_tokens": 1 << 20, **settings})
    options = RequestOptions(sampling=params, verification_method=method)
    random = torch.Generator().manual_seed(2)
    width = proposer._forward.model.spec.width
    tables = torch.randn((NUM_STREAMS, PROMPT_LENGTH + num_tokens + MAX_DRAFT + 1, width), generator=random).numpy()
    texts = torch.randint(0, VOCAB_SIZE, (NUM_STREAMS, PROMPT_LENGTH), generator=random).tolist()
    states = [sampler.start(params, sample=i, prompt_token_ids=text) for i, text in enumerate(texts)]
    num_drafted = num_accepted = step = 0
    end = PROMPT_LENGTH + num_tokens
    while open_ones := [i for i, text in enumerate(texts) if len(text) < end]:
        requests = [
            ProposalRequest(
                i,
                list(texts[i]),
                (step + i) % (MAX_DRAFT + 1),
                SequenceStart(options=options, sample=i, prompt_length=PROMPT_LENGTH),
                features=RandomFeatures(tables[i], len(texts[i])),
            )
            for i in open_ones
        ]
        with torch.inference_mode():
            trees = drafts_of(proposer, requests)
        drafts = [
            DraftRows(SampleRows(states[i], len(texts[i]), tree.token_ids), tree.distributions, method)
            for i, tree in zip(open_ones, trees, strict=True)
        ]
        step += 1
        verified = verify_now(verifier, np.tile(row, (sum(draft.rows.num_rows for draft in drafts), 1)), drafts)
        for i, draft, outcome in zip(open_ones, drafts, verified, strict=True):
            texts[i].extend(outcome.token_ids)
            num_drafted += len(draft.draft_token_ids)
            num_accepted += outcome.num_accepted
    assert num_drafted > NUM_STREAMS * num_tokens / 2
    return np.asarray([text[PROMPT_LENGTH:end] for text in texts]), num_accepted / num_drafted


@pytest.mark.pairwise
@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("in_torch", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(COUPLED, {}, id="coupled"),
        pytest.param(REJECTION, {}, id="rejection", marks=pytest.mark.full),
        pytest.param(REJECTION, {"temperature": 1.3, "top_p": 0.95}, id="rejection, filtered"),
    ],
)
def test_exact_methods_commit_the_targets_distribution(method, settings, in_torch, form, make_proposer, is_full):
    proposer = make_proposer(form, in_torch=in_torch)
    tokens, acceptance = generate(proposer, method, num_tokens=400 if is_full else 40, **settings)
    assert worst_z(tokens, probabilities(target_logits(), **settings)) < PASS
    assert acceptance > 0.02, "or no draft was tested"


# Negative controls


@pytest.mark.parametrize("form", WITH_OWN_IDS)
def test_a_race_by_the_heads_own_ids_is_noticed_by_what_is_accepted(form, make_proposer, monkeypatch):
    """Mistake: a head's own ids race before they are mapped to the target's. This is exact, but accepts few drafts."""
    _, acceptance = generate(make_proposer(form, in_torch=True), COUPLED, num_tokens=40, temperature=4.0)
    decide = HeadForward._decide

    def rename_after(self, logits, rows, **options):
        ids = self.steps.target_ids.tolist()

        def renamed(each):
            token_ids = tuple(ids[token_id] for token_id in each.token_ids)
            return each._replace(token_ids=token_ids, following=tuple(map(renamed, each.following)))

        return [renamed(each) for each in decide(self, logits, rows, **options)]

    monkeypatch.setattr(
        ModuleHeadSteps,
        "_of_target",
        lambda _, logits: pad(logits, (0, VOCAB_SIZE - logits.shape[1]), value=-torch.inf),
    )
    monkeypatch.setattr(HeadForward, "_decide", rename_after)
    tokens, without = generate(make_proposer(form, in_torch=True), COUPLED, num_tokens=40, temperature=4.0)
    assert acceptance > 4 * without
    assert worst_z(tokens, probabilities(target_logits(), temperature=4.0)) < PASS


def rejection_z(proposer, **settings):
    tokens, _ = generate(proposer, REJECTION, num_tokens=120, **settings)
    return worst_z(tokens, probabilities(target_logits(), **settings))


@pytest.mark.parametrize("form", ["eagle3", "mlp_speculator"])
def test_the_probabilities_of_another_row_are_noticed(form, make_proposer, monkeypatch):
    """Mistake: in a batch, each draft token gets the probabilities from which its neighbour was drawn."""
    proposer = make_proposer(form)
    distributions = DraftForward._distributions

    def of_the_next(self, logits, samples, places):
        return distributions(self, np.roll(logits, 1, 0), samples, places)

    monkeypatch.setattr(DraftForward, "_distributions", of_the_next)
    assert rejection_z(proposer, temperature=2.0) > PASS


def test_draws_beyond_what_is_sent_are_noticed(make_proposer, monkeypatch):
    """Mistake: the head draws from all of its ids, but sends the likeliest ones, renormalised."""
    proposer = make_proposer("mtp")
    monkeypatch.setattr("outrider.speculation.proposers.draft_forward.MAX_DISTRIBUTION_IDS", 8)
    start = DraftForward.start

    def start_uncut(self, start_of, token_ids):
        with monkeypatch.context() as patch:
            patch.setattr(SequenceStart, "wants_distributions", False)
            return start(self, start_of, token_ids)

    monkeypatch.setattr(DraftForward, "start", start_uncut)
    assert rejection_z(proposer, temperature=2.0) > PASS
