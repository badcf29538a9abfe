"""Tokens that a grammar forces are proposed, whatever the target has committed before."""

import pytest

from outrider.constraints.compiler import GrammarCompiler
from outrider.request import Constraint, ConstraintKind
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.grammar import GrammarProposer
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = [11, 40, 7]
CHOICE = Constraint(ConstraintKind.CHOICE, options=("the cat sat", "a dog"))


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=300, eos_token_ids=[EOS_TOKEN_ID])


def proposed(*states, num_wanted=20):
    """Returns the proposed text for each grammar state."""
    requests = [
        ProposalRequest(key, [*PROMPT, *range(key)], num_wanted, constraint=state) for key, state in enumerate(states)
    ]
    proposals = GrammarProposer().propose(requests)
    for request, proposal in zip(requests, proposals, strict=True):
        assert proposal.tree.length == len(request.token_ids)
    return [TOKENIZER.decode(proposal.tree.token_ids) for proposal in proposals]


def test_nothing_where_there_is_a_choice_and_the_rest_where_there_is_none(compiler):
    states = [compiler.start(CHOICE, ids(text)) for text in ("", "a", "the", "a dog")]
    assert proposed(*states) == ["", " dog", " cat sat", ""]


def test_the_sampler_finds_its_masks_as_they_were(compiler):
    state, other = (compiler.start(CHOICE, ids("the")) for _ in range(2))
    expected = other.masks((), tuple(ids(" cat sat"))).copy()
    for num_wanted in (20, 0, 1):
        proposed(state, num_wanted=num_wanted)
        assert (state.masks((), tuple(ids(" cat sat"))) == expected).all()
    state.commit(ids(" cat"))
    assert proposed(state) == [" sat"]


def test_no_more_than_is_wanted(compiler):
    state = compiler.start(CHOICE, ids("the"))
    assert proposed(state, num_wanted=1) == [TOKENIZER.decode(ids(" cat sat")[:1])]
    assert proposed(state, num_wanted=0) == [""]


def test_nothing_without_a_constraint_or_beside_it(compiler):
    assert proposed(None, compiler.start(CHOICE, ids("nonsense"))) == ["", ""]
