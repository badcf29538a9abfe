"""Any answers of a draft node: a decode node uses the possible ones, drops the others, and never fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.book import DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.prefix_hash import prefix_hash
from outrider.v1 import draft_pb2
from outrider.wire.draft import proposals_from_proto
from tests.drafting.books import take_updates

PROMPT = (5, 6, 7, 5, 6)
VOCAB_SIZE = 64
ANY_FLOAT = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf")]), st.floats(width=32))
ANY_ID = st.one_of(st.integers(0, VOCAB_SIZE), st.sampled_from([2**31, 2**32 - 1]))
LENGTHS = st.one_of(st.integers(0, 80), st.sampled_from([2**31, 2**32 - 1]))

distributions = st.builds(
    draft_pb2.TokenDistribution, token_ids=st.lists(ANY_ID, max_size=4), probabilities=st.lists(ANY_FLOAT, max_size=4)
)


@st.composite
def drawn_branches(draw):
    """Draws proposals as an honest node sends them, except for the probabilities."""
    token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3))
    drawn_from = [draft_pb2.TokenDistribution(token_ids=[each], probabilities=[draw(ANY_FLOAT)]) for each in token_ids]
    return draft_pb2.Branch(
        length=5, prefix_hash=prefix_hash(PROMPT), token_ids=token_ids, probability=1.0, distributions=drawn_from
    )


branches = drawn_branches() | st.builds(
    draft_pb2.Branch,
    length=LENGTHS,
    prefix_hash=st.one_of(st.just(prefix_hash(PROMPT)), st.integers(0, 2**64 - 1)),
    token_ids=st.lists(ANY_ID, max_size=12),
    probability=ANY_FLOAT,
    distributions=st.lists(distributions, max_size=4),
    parents=st.lists(st.integers(0, 12), max_size=12),
)
answers = st.builds(
    draft_pb2.SequenceProposals,
    sequence_id=st.integers(0, 4),
    acked_length=LENGTHS | st.just(5),
    branches=st.lists(branches, max_size=4),
    status=st.sampled_from([value for value in draft_pb2.DraftStatus.values() if value]),
)


@given(messages=st.lists(st.lists(answers, max_size=4), max_size=4), takes_trees=st.booleans())
def test_no_answer_of_a_draft_node_raises(messages, takes_trees):
    book = DraftBook(clock=lambda: 0.0)
    node = book.nodes.add()
    book.connected(node)
    for sequence_id, method in enumerate(VerificationMethod, start=1):
        params = SamplingParams(seed=1, max_tokens=100)
        start = SequenceStart(
            options=RequestOptions(sampling=params, verification_method=method),
            sample=0,
            prompt_length=5,
            takes_trees=takes_trees,
        )
        book.open(sequence_id, start, PROMPT, num_wanted=3)
    for message in messages:
        take_updates(book, node)
        for proto in message:
            answer = proposals_from_proto(proto)
            book.take_answer(node, answer, is_well_formed=is_well_formed(answer, vocab_size=VOCAB_SIZE))
        found = book.find((1, 2, 3), wait_seconds=0.0)
        assert all(max(tree.token_ids) < VOCAB_SIZE for tree in found.trees.values())
        for sequence_id in (1, 2, 3):
            book.update(sequence_id, [8], num_wanted=3)
