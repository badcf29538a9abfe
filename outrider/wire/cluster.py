"""Converts the model and cluster messages of router.proto to and from `outrider.node`."""

from __future__ import annotations

from outrider.node import ClusterStatus, Model, NodeLoad, NodeStatus
from outrider.v1 import router_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.enums import NODE_ROLES, NODE_STATES, VERIFICATION_METHODS
from outrider.wire.fields import Conversion, Fields

LOAD_FIGURES = (
    "num_running",
    "num_waiting",
    "kv_blocks_total",
    "kv_blocks_free",
    "tokens_per_second",
    "mean_acceptance_length",
    "look_ahead_hit_rate",
    "kv_bytes_per_second",
)
"""Names of the NodeLoad fields that clients see. In messages they are fields of the NodeStatus itself."""
_STATUS = Fields(
    NodeStatus,
    router_pb2.NodeStatus,
    elsewhere=("load", *LOAD_FIGURES),
    role=NODE_ROLES.from_proto_or(None),
    state=NODE_STATES.from_proto_or(None),
)


def _status_to_proto(status: NodeStatus) -> router_pb2.NodeStatus:
    return _STATUS.to_proto(status, **{name: getattr(status.load, name) for name in LOAD_FIGURES})


def _status_from_proto(proto: router_pb2.NodeStatus) -> NodeStatus:
    return _STATUS.from_proto(proto, load=NodeLoad(**{name: getattr(proto, name) for name in LOAD_FIGURES}))


MODEL = Fields(
    Model,
    router_pb2.GetModelResponse,
    verification_method=VERIFICATION_METHODS.from_proto_or(None),
    adapters=ADAPTER,
    default_sampling=Conversion(
        lambda values: router_pb2.SamplingParams(**values),
        lambda proto: {field.name: type(value)(f"{value:.7g}") for field, value in proto.ListFields()},  # float32
    ),
)
CLUSTER = Fields(ClusterStatus, router_pb2.WatchClusterResponse, nodes=Conversion(_status_to_proto, _status_from_proto))
