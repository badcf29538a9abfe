"""Converts node.proto to and from `outrider.node`."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from outrider.node import FeatureFormat, ModelInfo, NodeInfo, NodeLoad, NodeReport
from outrider.protocol_versions import ProtocolVersions
from outrider.request import Adapter
from outrider.v1 import draft_pb2, node_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.enums import NODE_ROLES, NODE_STATES
from outrider.wire.fields import Conversion, Fields

FEATURES = Fields(FeatureFormat, node_pb2.FeatureFormat)

_INFO = Fields(
    NodeInfo,
    node_pb2.NodeInfo,
    elsewhere=("protocol_versions", "protocol_version", "oldest_protocol_version"),
    role=NODE_ROLES,
    state=NODE_STATES,
    model=Fields(ModelInfo, node_pb2.ModelInfo, features=FEATURES),
)
_RATE = Conversion(lambda rate: rate, lambda rate: rate if isfinite(rate) else 0.0)  # peers' input is untrusted
_LOAD = Fields(
    NodeLoad,
    node_pb2.NodeLoad,
    tokens_per_second=_RATE,
    mean_acceptance_length=_RATE,
    look_ahead_hit_rate=_RATE,
    kv_bytes_per_second=_RATE,
)
_ADAPTERS = Conversion(
    lambda adapters: node_pb2.AdapterList(adapters=map(ADAPTER.to_proto, adapters)),
    lambda proto: tuple(map(ADAPTER.from_proto, proto.adapters)),
)
REPORT = Fields(NodeReport, node_pb2.NodeReport, state=NODE_STATES, load=_LOAD, adapters=_ADAPTERS)
"""Converts a NodeReport. `from_proto` raises ValueError if this version does not know the state."""


class ReportWriter:
    """Converts the reports of one stream. Adapters, which may be many, are in the first and where they have changed."""

    _written: tuple[Adapter, ...] | None = None

    def to_proto(self, report: NodeReport) -> node_pb2.NodeReport:
        if report.adapters == self._written:
            return REPORT.to_proto(replace(report, adapters=None))
        self._written = report.adapters
        return REPORT.to_proto(report)


def info_to_proto(info: NodeInfo) -> node_pb2.NodeInfo:
    return _INFO.to_proto(info, **versions_to_proto(info.protocol_versions))


def info_from_proto(proto: node_pb2.NodeInfo) -> NodeInfo:
    """Raises: ValueError if this version does not know the role or state."""
    return _INFO.from_proto(proto, protocol_versions=versions_from_proto(proto))


def versions_to_proto(versions: ProtocolVersions) -> dict[str, int]:
    """Returns the version fields of a hello, for any message that has them."""
    return {"protocol_version": versions.newest, "oldest_protocol_version": versions.oldest}


def versions_from_proto(proto: node_pb2.NodeInfo | draft_pb2.DraftHello) -> ProtocolVersions:
    return ProtocolVersions.of_hello(oldest=proto.oldest_protocol_version, newest=proto.protocol_version)
