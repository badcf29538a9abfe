"""What a grammar forces is proposed, after whatever tokens the target has committed."""

import pytest

from outrider.constraints.compiler import GrammarCompiler
from outrider.request import Constraint, ConstraintKind, RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.grammar import GrammarProposer
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = [11, 40, 7]
CHOICE = Constraint(ConstraintKind.CHOICE, options=("the cat sat", "a dog"))


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
def proposer():
    return GrammarProposer(GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=300, eos_token_ids=[EOS_TOKEN_ID]))


def proposed(proposer, *texts, constraint=CHOICE, num_wanted=20):
    """Of each sequence, whose generated text this is."""
    options = RequestOptions(sampling=SamplingParams(seed=1, max_tokens=50, constraint=constraint))
    start = SequenceStart(options=options, sample=0, prompt_length=len(PROMPT))
    requests = [ProposalRequest(key, [*PROMPT, *ids(text)], num_wanted, start) for key, text in enumerate(texts)]
    proposals = proposer.propose(requests)
    for request, proposal in zip(requests, proposals, strict=True):
        assert proposal.tree.length == len(request.token_ids)
    return [TOKENIZER.decode(proposal.tree.token_ids) for proposal in proposals]


def test_nothing_where_there_is_a_choice_and_the_rest_where_there_is_none(proposer):
    assert proposed(proposer, "", "a") == ["", " dog"]
    assert proposed(proposer, "the", "a dog") == [" cat sat", ""]


def test_several_tokens_are_caught_up_with_also_when_nothing_was_wanted_meanwhile(proposer):
    assert proposed(proposer, "") == [""]
    assert proposed(proposer, "the c", num_wanted=0) == [""]
    assert proposed(proposer, "the cat") == [" sat"]


def test_no_more_than_is_wanted(proposer):
    assert proposed(proposer, "the", num_wanted=1) == [TOKENIZER.decode(ids(" cat sat")[:1])]


def test_a_forgotten_sequence_is_followed_anew(proposer):
    assert proposed(proposer, "the") == [" cat sat"]
    proposer.forget(0)
    proposer.forget(7)
    assert not proposer._followed
    assert proposed(proposer, "a") == [" dog"]


def test_nothing_without_a_constraint_or_beside_it(proposer):
    assert proposed(proposer, "the", constraint=None) == [""]
    assert not proposer._followed
    assert proposed(proposer, "nonsense") == [""]
    assert proposed(proposer, "nonsense again") == [""]
