"""Converts draft.proto to and from `outrider.speculation.draft_stream`."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.speculation.draft_stream import (
    MAX_BRANCH_TOKENS,
    MAX_BRANCHES_PER_SEQUENCE,
    DraftHello,
    DraftStatus,
    FeatureOffer,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    StepNotice,
)
from outrider.speculation.draft_tree import DRAFT_NODE, DraftTree
from outrider.speculation.token_distribution import MAX_DISTRIBUTION_IDS, TokenDistribution
from outrider.v1 import draft_pb2
from outrider.wire.enums import EnumTable
from outrider.wire.fields import TRACEPARENT, Fields
from outrider.wire.node import FEATURES, versions_from_proto, versions_to_proto
from outrider.wire.request import OPTIONS

DRAFT_STATUSES = EnumTable(DraftStatus, draft_pb2.DraftStatus, "DRAFT_STATUS")

TOO_MANY_TOKENS = 256
"""Maximum number of tokens that are read from a branch. It is above the allowed number, so that the decode node detects
branches that are too long.
"""

MAX_GRADE = 16
"""The highest grade. Acceptance is tracked per grade, so a peer must not be able to create further grades."""

TRANSFER_ID_BYTES = 16
"""Length of a transfer's id. An offer with another one is ignored."""

MAX_STEP_MICROSECONDS = 10_000_000
"""Maximum duration of a step, and of a draft node's look-ahead, in microseconds."""


_HELLO = Fields(
    DraftHello,
    draft_pb2.DraftHello,
    elsewhere=("protocol_versions", "protocol_version", "oldest_protocol_version"),
    features=FEATURES,
)
_START = Fields(SequenceStart, draft_pb2.SequenceStart, options=OPTIONS, traceparent=TRACEPARENT)


def hello_to_proto(hello: DraftHello) -> draft_pb2.DraftHello:
    return _HELLO.to_proto(hello, **versions_to_proto(hello.protocol_versions))


def hello_from_proto(proto: draft_pb2.DraftHello) -> DraftHello:
    return _HELLO.from_proto(proto, protocol_versions=versions_from_proto(proto))


def updates_to_proto(
    updates: Iterable[SequenceUpdate], *, step_seconds: float, notices: Iterable[StepNotice] = ()
) -> draft_pb2.DraftUpdate:
    """Returns one message with all updates and notices. `step_seconds`: the current duration of an engine step."""
    message = draft_pb2.DraftUpdate(
        step_microseconds=step_to_proto(step_seconds),
        notices=[draft_pb2.StepNotice(**notice._asdict()) for notice in notices],
    )
    add = message.sequences.add
    for update in updates:
        if update.closed:
            add(sequence_id=update.sequence_id, closed=True)
            continue
        added = add(
            sequence_id=update.sequence_id,
            start_length=update.start_length,
            token_ids=update.token_ids,
            length=update.length,
            prefix_hash=update.prefix_hash,
            num_wanted=update.num_wanted,
            feature_start=update.feature_start,
            features=update.features,
            min_reach=update.min_reach,
        )
        if update.feature_offer is not None:
            added.feature_offer.CopyFrom(draft_pb2.FeatureOffer(**update.feature_offer._asdict()))
        if update.start is not None:
            added.start.CopyFrom(_START.to_proto(update.start))
    return message


def notice_from_proto(proto: draft_pb2.StepNotice) -> StepNotice:
    return StepNotice(proto.sequence_id, proto.length, tuple(proto.token_ids[:MAX_BRANCH_TOKENS]))


def update_from_proto(proto: draft_pb2.SequenceUpdate) -> SequenceUpdate:
    offer = proto.feature_offer
    is_offered = len(offer.transfer_id) == TRANSFER_ID_BYTES
    return SequenceUpdate(
        sequence_id=proto.sequence_id,
        start=_START.from_proto(proto.start) if proto.HasField("start") else None,
        start_length=proto.start_length,
        token_ids=tuple(proto.token_ids),
        length=proto.length,
        prefix_hash=proto.prefix_hash,
        num_wanted=proto.num_wanted,
        closed=proto.closed,
        feature_start=proto.feature_start,
        features=proto.features,
        min_reach=proto.min_reach,
        feature_offer=FeatureOffer(offer.transfer_id, offer.end_token, offer.address) if is_offered else None,
    )


def proposals_to_proto(proposals: SequenceProposals) -> draft_pb2.SequenceProposals:
    return draft_pb2.SequenceProposals(
        sequence_id=proposals.sequence_id,
        acked_length=proposals.acked_length,
        acked_features=proposals.acked_features,
        branches=[
            draft_pb2.Branch(
                length=branch.length,
                prefix_hash=branch.prefix_hash,
                token_ids=branch.token_ids,
                probability=branch.probability,
                parents=[parent + 1 for parent in branch.parents],
                grade=branch.grade,
                distributions=[
                    draft_pb2.TokenDistribution(token_ids=each.token_ids, probabilities=each.probabilities)
                    for each in branch.distributions
                ],
            )
            for branch in proposals.branches
        ],
        status=DRAFT_STATUSES.to_proto(proposals.status),
    )


def proposals_from_proto(proto: draft_pb2.SequenceProposals) -> SequenceProposals:
    """Returns the proposals, truncated to plausible lengths but not validated; the decode node validates them later.

    Raises: ValueError if this version does not know the status.
    """
    return SequenceProposals(
        proto.sequence_id,
        DRAFT_STATUSES.from_proto(proto.status),
        proto.acked_length,
        tuple(map(_tree_from, proto.branches[: MAX_BRANCHES_PER_SEQUENCE + 1])),
        proto.acked_features,
    )


def _tree_from(proto: draft_pb2.Branch) -> DraftTree:
    distributions, parents = proto.distributions, proto.parents
    return DraftTree(
        proto.length,
        proto.prefix_hash,
        tuple(proto.token_ids[:TOO_MANY_TOKENS]),
        DRAFT_NODE,
        min(proto.probability, 1.0) if proto.probability > 0.0 else 0.0,  # NaN becomes 0
        # The conditions save time, because most branches are chains without distributions.
        tuple(map(_distribution_from, distributions[:TOO_MANY_TOKENS])) if distributions else (),
        tuple(parent - 1 for parent in parents[:TOO_MANY_TOKENS]) if parents else (),
        min(proto.grade, MAX_GRADE),
    )


def _distribution_from(proto: draft_pb2.TokenDistribution) -> TokenDistribution:
    most = MAX_DISTRIBUTION_IDS + 1
    return TokenDistribution(tuple(proto.token_ids[:most]), tuple(proto.probabilities[:most]))


def step_to_proto(step_seconds: float) -> int:
    """Converts seconds to microseconds, limited to `MAX_STEP_MICROSECONDS`."""
    return min(round(step_seconds * 1e6), MAX_STEP_MICROSECONDS)


def step_from_proto(step_microseconds: int) -> float:
    """Converts microseconds, limited to `MAX_STEP_MICROSECONDS`, to seconds."""
    return min(step_microseconds, MAX_STEP_MICROSECONDS) / 1e6
