"""A node with only an identity, for tests of the service around it."""

from __future__ import annotations

from outrider.node import NodeInfo, NodeReport, NodeRole, NodeState

INFO = NodeInfo(incarnation=b"i" * 16, name="node", role=NodeRole.DECODE, state=NodeState.SERVING, version="0")
REPORT = NodeReport(state=NodeState.SERVING, incarnation=INFO.incarnation)
