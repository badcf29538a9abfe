"""node.proto ⇄ `outrider.node`."""

from __future__ import annotations

from outrider.node import FeatureFormat, ModelInfo, NodeInfo, NodeLoad, NodeReport
from outrider.protocol_versions import ProtocolVersions
from outrider.v1 import draft_pb2, node_pb2
from outrider.wire.enums import NODE_ROLES, NODE_STATES
from outrider.wire.fields import Fields

FEATURES = Fields(FeatureFormat, node_pb2.FeatureFormat)

_INFO = Fields(
    NodeInfo,
    node_pb2.NodeInfo,
    elsewhere=("protocol_versions", "protocol_version", "oldest_protocol_version"),
    role=NODE_ROLES,
    state=NODE_STATES,
    model=Fields(ModelInfo, node_pb2.ModelInfo, features=FEATURES),
)


def info_to_proto(info: NodeInfo) -> node_pb2.NodeInfo:
    return _INFO.to_proto(info, **versions_to_proto(info.protocol_versions))


def info_from_proto(proto: node_pb2.NodeInfo) -> NodeInfo:
    """Raises: ValueError for a role or state that this version does not know."""
    return _INFO.from_proto(proto, protocol_versions=versions_from_proto(proto))


def versions_to_proto(versions: ProtocolVersions) -> dict[str, int]:
    """The fields of a hello, whichever message that is."""
    return {"protocol_version": versions.newest, "oldest_protocol_version": versions.oldest}


def versions_from_proto(proto: node_pb2.NodeInfo | draft_pb2.DraftHello) -> ProtocolVersions:
    return ProtocolVersions.of_hello(oldest=proto.oldest_protocol_version, newest=proto.protocol_version)


def report_to_proto(report: NodeReport) -> node_pb2.NodeReport:
    load = report.load
    return node_pb2.NodeReport(
        state=NODE_STATES.to_proto(report.state),
        step=report.step,
        expected_step_microseconds=round(report.expected_step_seconds * 1e6),
        step_age_microseconds=round(report.step_age_seconds * 1e6),
        load=node_pb2.NodeLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_blocks_total=load.kv_blocks_total,
            kv_blocks_free=load.kv_blocks_free,
            tokens_per_second=load.tokens_per_second,
            mean_acceptance_length=load.mean_acceptance_length,
            num_outstanding_tokens=load.num_outstanding_tokens,
            num_sequences_free=load.num_sequences_free,
            max_rows_per_step=load.max_rows_per_step,
        ),
        incarnation=report.incarnation,
    )


def report_from_proto(proto: node_pb2.NodeReport) -> NodeReport:
    """Raises: ValueError for a state that this version does not know."""
    load = proto.load
    return NodeReport(
        state=NODE_STATES.from_proto(proto.state),
        incarnation=proto.incarnation,
        step=proto.step,
        expected_step_seconds=proto.expected_step_microseconds / 1e6,
        step_age_seconds=proto.step_age_microseconds / 1e6,
        load=NodeLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_blocks_total=load.kv_blocks_total,
            kv_blocks_free=load.kv_blocks_free,
            tokens_per_second=load.tokens_per_second,
            mean_acceptance_length=load.mean_acceptance_length,
            num_outstanding_tokens=load.num_outstanding_tokens,
            num_sequences_free=load.num_sequences_free,
            max_rows_per_step=load.max_rows_per_step,
        ),
    )
