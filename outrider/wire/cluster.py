"""router.proto's model and cluster ⇄ `outrider.node`."""

from __future__ import annotations

from outrider.node import ClusterStatus, Model, NodeLoad, NodeStatus
from outrider.v1 import router_pb2
from outrider.wire.enums import NODE_ROLES, NODE_STATES, VERIFICATION_METHODS
from outrider.wire.fields import Conversion, Fields


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


MODEL = Fields(Model, router_pb2.GetModelResponse, verification_method=VERIFICATION_METHODS.or_else(None))
CLUSTER = Fields(
    ClusterStatus,
    router_pb2.WatchClusterResponse,
    nodes=Conversion(_node_status_to_proto, _node_status_from_proto),
)
