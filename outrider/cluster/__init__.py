"""A local cluster: the four services as child processes of this one. What `outrider up` runs. Torch-free.

with Cluster(ClusterConfig(port=0)) as cluster:
    with Client(cluster.router_address) as client:
        ...
assert set(cluster.exit_statuses.values()) == {0}
"""

from __future__ import annotations

from outrider.cluster.child import ChildState, ClusterEvent, EventKind, NodeProcess
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig, Supervision
from outrider.cluster.plan import Launch

__all__ = [
    "ChildState",
    "Cluster",
    "ClusterConfig",
    "ClusterEvent",
    "EventKind",
    "Launch",
    "NodeProcess",
    "Supervision",
]
