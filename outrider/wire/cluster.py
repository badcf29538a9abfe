"""router.proto's model and cluster ⇄ `outrider.node`."""

from __future__ import annotations

from outrider.node import ClusterStatus, Model, NodeLoad, NodeStatus
from outrider.v1 import router_pb2
from outrider.wire.enums import NODE_ROLES, NODE_STATES, VERIFICATION_METHODS


def model_to_proto(model: Model) -> router_pb2.GetModelResponse:
    return router_pb2.GetModelResponse(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        proposer=model.proposer,
        num_speculative_tokens=model.num_speculative_tokens,
        verification_method=VERIFICATION_METHODS.to_proto(model.verification_method),
        fingerprint=model.fingerprint,
        version=model.version,
    )


def model_from_proto(proto: router_pb2.GetModelResponse) -> Model:
    return Model(
        name=proto.name,
        revision=proto.revision,
        vocab_size=proto.vocab_size,
        max_model_len=proto.max_model_len,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        proposer=proto.proposer,
        num_speculative_tokens=proto.num_speculative_tokens,
        verification_method=VERIFICATION_METHODS.known_from_proto(proto.verification_method),
        fingerprint=proto.fingerprint,
        version=proto.version,
    )


def cluster_to_proto(status: ClusterStatus) -> router_pb2.WatchClusterResponse:
    return router_pb2.WatchClusterResponse(
        nodes=map(_node_status_to_proto, status.nodes),
        num_requests_running=status.num_requests_running,
        num_requests_waiting=status.num_requests_waiting,
    )


def cluster_from_proto(proto: router_pb2.WatchClusterResponse) -> ClusterStatus:
    return ClusterStatus(
        nodes=tuple(map(_node_status_from_proto, proto.nodes)),
        num_requests_running=proto.num_requests_running,
        num_requests_waiting=proto.num_requests_waiting,
    )


def _node_status_to_proto(status: NodeStatus) -> router_pb2.NodeStatus:
    return router_pb2.NodeStatus(
        name=status.name,
        role=NODE_ROLES.to_proto(status.role),
        state=NODE_STATES.to_proto(status.state),
        target=status.target,
        step=status.step,
        num_running=status.load.num_running,
        num_waiting=status.load.num_waiting,
        kv_blocks_total=status.load.kv_blocks_total,
        kv_blocks_free=status.load.kv_blocks_free,
        tokens_per_second=status.load.tokens_per_second,
        mean_acceptance_length=status.load.mean_acceptance_length,
    )


def _node_status_from_proto(proto: router_pb2.NodeStatus) -> NodeStatus:
    return NodeStatus(
        name=proto.name,
        role=NODE_ROLES.known_from_proto(proto.role),
        state=NODE_STATES.known_from_proto(proto.state),
        target=proto.target,
        step=proto.step,
        load=NodeLoad(
            num_running=proto.num_running,
            num_waiting=proto.num_waiting,
            kv_blocks_total=proto.kv_blocks_total,
            kv_blocks_free=proto.kv_blocks_free,
            tokens_per_second=proto.tokens_per_second,
            mean_acceptance_length=proto.mean_acceptance_length,
        ),
    )
