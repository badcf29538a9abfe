from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.node import ClusterStatus, Model, NodeLoad, NodeRole, NodeState, NodeStatus
from outrider.request import FinishReason, LogprobsMode, VerificationMethod
from outrider.v1 import router_pb2
from outrider.wire import enums
from outrider.wire.cluster import CLUSTER
from outrider.wire.cluster import MODEL as MODEL_FIELDS

MODEL = Model(
    name="m",
    revision="r",
    vocab_size=9,
    max_model_len=8,
    eos_token_ids=(1, 2),
    dtype="bfloat16",
    proposer="ngram",
    num_speculative_tokens=5,
    verification_method=VerificationMethod.COUPLED,
    fingerprint="f",
    version="1.2.3",
    default_sampling={"temperature": 0.5, "top_k": 20},
)
LOAD = NodeLoad(
    num_running=1,
    num_waiting=2,
    kv_blocks_total=3,
    kv_blocks_free=4,
    tokens_per_second=0.5,
    mean_acceptance_length=1.5,
    look_ahead_hit_rate=0.25,
    kv_bytes_per_second=7.5,
)


def test_the_model_survives_the_wire():
    data = MODEL_FIELDS.to_proto(MODEL).SerializeToString()
    assert MODEL_FIELDS.from_proto(router_pb2.GetModelResponse.FromString(data)) == MODEL


@pytest.mark.parametrize("state", NodeState)
@pytest.mark.parametrize("role", NodeRole)
def test_the_cluster_survives_the_wire(role, state):
    nodes = (
        NodeStatus(name="a", role=role, state=state, target="h:1", step=7, load=LOAD),
        NodeStatus(name="b", role=role, state=NodeState.LOST, target="h:2", condition="unreachable: gone"),
    )
    status = ClusterStatus(
        nodes=nodes,
        num_requests_running=3,
        num_requests_waiting=4,
        num_waiting_tokens=2**40,
        oldest_wait_seconds=1.25,
        num_moves=5,
    )
    data = CLUSTER.to_proto(status).SerializeToString()
    assert CLUSTER.from_proto(router_pb2.WatchClusterResponse.FromString(data)) == status


def test_what_a_later_router_may_say_is_none():
    nodes = [router_pb2.NodeStatus(name="a", role=99, state=98)]
    status = CLUSTER.from_proto(router_pb2.WatchClusterResponse(nodes=nodes))
    assert (status.nodes[0].role, status.nodes[0].state) == (None, None)
    later = router_pb2.GetModelResponse(verification_method=97)
    assert MODEL_FIELDS.from_proto(later).verification_method is None
    assert MODEL_FIELDS.to_proto(replace(MODEL, verification_method=None)).verification_method == 0


@pytest.mark.parametrize(
    ("table", "members", "proto"),
    [
        (enums.FINISH_REASONS, FinishReason, router_pb2.FinishReason),
        (enums.LOGPROBS_MODES, LogprobsMode, router_pb2.LogprobsMode),
        (enums.NODE_ROLES, NodeRole, router_pb2.NodeRole),
        (enums.NODE_STATES, NodeState, router_pb2.NodeState),
        (enums.VERIFICATION_METHODS, VerificationMethod, router_pb2.VerificationMethod),
    ],
)
def test_a_table_has_every_value_of_the_contract(table, members, proto):
    assert {table.to_proto(member) for member in members} == set(proto.values()) - {0}
    for member in members:
        assert table.from_proto(table.to_proto(member)) is member
    for number in (0, 99):
        with pytest.raises(ValueError, match=str(number)):
            table.from_proto(number)
