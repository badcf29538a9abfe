from __future__ import annotations

import math

import pytest

from outrider.node import FeatureFormat
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import (
    MAX_BRANCH_TOKENS,
    DraftHello,
    DraftStatus,
    FeatureOffer,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    StepNotice,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.token_distribution import TokenDistribution
from outrider.v1 import draft_pb2
from outrider.wire.draft import (
    hello_from_proto,
    hello_to_proto,
    notice_from_proto,
    proposals_from_proto,
    proposals_to_proto,
    step_from_proto,
    step_to_proto,
    update_from_proto,
    updates_to_proto,
)

START = SequenceStart(
    options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=7), cache_salt=b"alice"),
    sample=3,
    prompt_length=2,
    takes_trees=True,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)


@pytest.mark.parametrize(
    "update",
    [
        SequenceUpdate(
            sequence_id=2**63,
            start=START,
            token_ids=(1, 2, 2**32 - 1),
            length=3,
            prefix_hash=2**64 - 1,
            num_wanted=5,
        ),
        SequenceUpdate(sequence_id=1, start_length=3, token_ids=(4,), length=4, prefix_hash=0),
        SequenceUpdate(sequence_id=1, closed=True),
        SequenceUpdate(
            sequence_id=1, start_length=9, length=9, feature_start=4, features=bytes(range(32)), min_reach=0.25
        ),
        SequenceUpdate(sequence_id=1, length=9, feature_offer=FeatureOffer(bytes(range(16)), 8, "[::1]:50052")),
    ],
    ids=["first", "later", "closed", "features", "offered features"],
)
def test_an_update_survives_the_wire(update):
    data = updates_to_proto([update], step_seconds=0.5).SerializeToString()
    message = draft_pb2.DraftUpdate.FromString(data)
    assert [update_from_proto(each) for each in message.sequences] == [update]
    assert message.step_microseconds == 500_000


def test_a_notice_survives_the_wire_and_a_long_one_is_cut():
    notices = [StepNotice(1, 9, (5, 6)), StepNotice(2, 4, ())]
    data = updates_to_proto([], step_seconds=0.0, notices=notices).SerializeToString()
    assert [notice_from_proto(each) for each in draft_pb2.DraftUpdate.FromString(data).notices] == notices
    assert len(notice_from_proto(draft_pb2.StepNotice(token_ids=[1] * 9999)).token_ids) == MAX_BRANCH_TOKENS


def test_an_offer_whose_transfer_id_is_none_is_ignored():
    for transfer_id in (b"", bytes(15), bytes(17)):
        offer = draft_pb2.FeatureOffer(transfer_id=transfer_id, end_token=8, address="decode:50052")
        assert update_from_proto(draft_pb2.SequenceUpdate(feature_offer=offer)).feature_offer is None


def test_a_traceparent_without_end_is_not_held():
    start = draft_pb2.SequenceStart(traceparent="0" * 100_000)
    assert update_from_proto(draft_pb2.SequenceUpdate(start=start)).start.traceparent == ""


@pytest.mark.parametrize(
    "proposals",
    [
        SequenceProposals(
            sequence_id=1,
            status=DraftStatus.PROPOSED,
            acked_length=9,
            branches=(
                DraftTree(9, 2**64 - 1, (1, 2)),
                DraftTree(9, 7, (1, 2, 3), parents=(-1, -1, 1), grade=3),
                DraftTree(8, 0, (3,), distributions=(TokenDistribution((3, 2**32 - 1), (0.75, 0.25)),)),
            ),
        ),
        SequenceProposals(sequence_id=1, status=DraftStatus.CATCHING_UP, acked_length=9, acked_features=7),
        SequenceProposals(sequence_id=1, status=DraftStatus.UNKNOWN_PREFIX),
    ],
    ids=["branches", "catching_up", "unknown_prefix"],
)
def test_proposals_survive_the_wire(proposals):
    data = proposals_to_proto(proposals).SerializeToString()
    assert proposals_from_proto(draft_pb2.SequenceProposals.FromString(data)) == proposals


@pytest.mark.parametrize(
    "features", [None, FeatureFormat(fingerprint="cd", width=576, dtype="bfloat16", taps=(2, 15, 28))]
)
def test_a_hello_survives_the_wire(features):
    hello = DraftHello(
        incarnation=bytes(range(16)),
        name="decode@1.2.3.4:5",
        vocab_size=49152,
        vocabulary_fingerprint="ab",
        max_model_len=8192,
        features=features,
    )
    assert hello_from_proto(draft_pb2.DraftHello.FromString(hello_to_proto(hello).SerializeToString())) == hello


def test_a_step_survives_the_wire_to_the_microsecond_and_none_is_endless():
    assert step_from_proto(step_to_proto(0.0301234567)) == 0.030123
    assert step_from_proto(step_to_proto(1e9)) == 10.0
    assert step_from_proto(2**32 - 1) == 10.0


@pytest.mark.parametrize(("sent", "taken"), [(0.25, 0.25), (7.0, 1.0), (-1.0, 0.0), (math.nan, 0.0)])
def test_a_probability_is_one_whatever_was_sent(sent, taken):
    proto = draft_pb2.SequenceProposals(
        sequence_id=1,
        status=draft_pb2.DRAFT_STATUS_AHEAD,
        branches=[draft_pb2.Branch(length=1, token_ids=[2], probability=sent)],
    )
    assert proposals_from_proto(proto).branches[0].probability == taken
