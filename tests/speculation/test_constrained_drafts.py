"""Draft models and heads apply the target's constraint masks, so acceptance is as high as without a constraint."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.constraints.compiler import NUM_THREADS, GrammarCompiler
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import Constraint, ConstraintKind, SamplingParams
from outrider.speculation.proposers.base import ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_forward import allowed_of
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.proposers.model_forward import ModelForward
from tests.speculation.asking import PROMPT, proposals_of, start_of
from tests.speculation.draft_trees import likeliest_path
from tests.support.tiny_model import EOS_TOKEN_ID, make_tiny_model, tiny_tokenizer
from tests.support.toy_head import VOCAB_SIZE, ToyFeatures, ToyHead
from tests.support.waiting import PATIENCE_SECONDS

LETTERS = Constraint(ConstraintKind.REGEX, "[a-f]{3,40}(x|yz)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(make_tiny_model(tmp_path_factory.mktemp("draft")))))


@pytest.fixture
def constraints():
    return GrammarCompiler(tiny_tokenizer().to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])


def request(token_ids, constraint, *, num_wanted=6, features=None):
    sampling = SamplingParams(seed=5, max_tokens=100, temperature=1.0, constraint=constraint)
    return ProposalRequest(1, token_ids, num_wanted, start_of(sampling), features=features)


def draft(proposer, asked):
    (proposal,) = proposals_of(proposer, asked)
    return likeliest_path(proposal.tree).token_ids


def compile_beside(constraints, proposer, asked):
    """Checks that the first call does not wait for the constraint to be compiled."""
    may_compile = threading.Event()
    for _ in range(NUM_THREADS):
        constraints._threads.submit(may_compile.wait, PATIENCE_SECONDS)
    try:
        assert draft(proposer, asked) == ()
    finally:
        may_compile.set()
    constraints.prepare(asked.start.options.sampling.constraint).exception(PATIENCE_SECONDS)


def assert_allowed(constraints, constraint, generated, token_ids):
    state = constraints.start(constraint, [*generated, *token_ids])
    assert not state.failure


def test_the_targets_own_model_drafts_what_the_target_decides(model):
    """Every token is accepted, as without a constraint."""
    forward = ModelForward.of(model, kv_cache=KVCacheConfig(num_blocks=128))
    proposer = DraftModelProposer(forward, ProposerInfo(name="draft_model:tiny"))
    text, constraints = list(PROMPT), forward.sampler.constraints
    compile_beside(constraints, proposer, request(text, LETTERS))
    target = DraftModelProposer(
        ModelForward.of(model, kv_cache=KVCacheConfig(num_blocks=128)), ProposerInfo(name="draft_model:tiny")
    )
    for _ in range(3):
        found = draft(proposer, request(text, LETTERS))
        assert len(found) == 6
        assert_allowed(constraints, LETTERS, text[len(PROMPT) :], found)
        for token_id in found:
            assert draft(target, request(text, LETTERS, num_wanted=1))[:1] == (token_id,)
            text.append(token_id)


def test_a_head_drafts_what_the_grammar_allows_and_wins_as_the_target_would(constraints):
    head = ToyHead()
    known = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    forward = HeadForward.of(head, num_cached_tokens=4096, known_token_ids=known, constraints=constraints, device="cpu")
    proposer, text = DraftModelProposer(forward, ProposerInfo(name="toy:tiny")), list(PROMPT)
    compile_beside(constraints, proposer, request(text, LETTERS, features=ToyFeatures(text)))
    for _ in range(3):
        found = draft(proposer, request(text, LETTERS, features=ToyFeatures(text)))
        assert found
        assert_allowed(constraints, LETTERS, text[len(PROMPT) :], found)
        text += found[:2]


def test_a_constraint_that_cannot_be_compiled_here_has_no_drafts_and_fails_nobody(constraints):
    """Another version of llguidance may refuse a constraint that the target accepts."""
    bad = Constraint(ConstraintKind.REGEX, "(a")
    constraints.warm_up()
    forward = HeadForward.of(
        ToyHead(),
        num_cached_tokens=4096,
        known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool),
        constraints=constraints,
        device="cpu",
    )
    proposer = DraftModelProposer(forward, ProposerInfo(name="toy:tiny"))
    compile_beside(constraints, proposer, request(PROMPT, bad, features=ToyFeatures(PROMPT)))
    assert draft(proposer, request(PROMPT, bad, features=ToyFeatures(PROMPT))) == ()


def test_runners_up_are_different_tokens_that_the_grammar_allows():
    """A race among few allowed tokens is won again by one of them, or by one that is not allowed."""
    masks = np.zeros((1, 2), dtype=np.uint32)
    masks[0, 0], masks[0, 1] = 0b1010, 0b1
    constrained, free = SimpleNamespace(masks=lambda: masks), SimpleNamespace(masks=lambda: None)
    assert allowed_of((3, 2, 32, 3, 33, 1), constrained) == (3, 32, 1)
    assert allowed_of((3, 2, 32), free) == (3, 2, 32)
