"""node.proto ⇄ `outrider.node`."""

from __future__ import annotations

from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport
from outrider.protocol_versions import ProtocolVersions
from outrider.v1 import node_pb2
from outrider.wire.enums import NODE_ROLES, NODE_STATES


def info_to_proto(info: NodeInfo) -> node_pb2.NodeInfo:
    proto = node_pb2.NodeInfo(
        protocol_version=info.protocol_versions.newest,
        oldest_protocol_version=info.protocol_versions.oldest,
        incarnation=info.incarnation,
        name=info.name,
        role=NODE_ROLES.to_proto(info.role),
        state=NODE_STATES.to_proto(info.state),
        version=info.version,
    )
    if info.model is not None:
        proto.model.CopyFrom(model_to_proto(info.model))
    return proto


def info_from_proto(proto: node_pb2.NodeInfo) -> NodeInfo:
    """Raises: ValueError for a role or state that this version does not know."""
    return NodeInfo(
        incarnation=proto.incarnation,
        name=proto.name,
        role=NODE_ROLES.from_proto(proto.role),
        state=NODE_STATES.from_proto(proto.state),
        version=proto.version,
        model=model_from_proto(proto.model) if proto.HasField("model") else None,
        protocol_versions=ProtocolVersions.of_hello(
            oldest=proto.oldest_protocol_version, newest=proto.protocol_version
        ),
    )


def model_to_proto(model: ModelInfo) -> node_pb2.ModelInfo:
    return node_pb2.ModelInfo(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        fingerprint=model.fingerprint,
        vocabulary_fingerprint=model.vocabulary_fingerprint,
        proposer=model.proposer,
        num_speculative_tokens=model.num_speculative_tokens,
        numerics=model.numerics,
    )


def model_from_proto(proto: node_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=proto.name,
        revision=proto.revision,
        vocab_size=proto.vocab_size,
        max_model_len=proto.max_model_len,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        fingerprint=proto.fingerprint,
        vocabulary_fingerprint=proto.vocabulary_fingerprint,
        proposer=proto.proposer,
        num_speculative_tokens=proto.num_speculative_tokens,
        numerics=proto.numerics,
    )


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
        ),
    )
