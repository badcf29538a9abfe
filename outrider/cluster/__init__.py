"""A local cluster: the four services as child processes of this one, as `outrider up` runs it. Imports no torch.

with Cluster(ClusterConfig(port=0)) as cluster:
    with Client(cluster.router_address) as client:
        ...
assert set(cluster.exit_statuses.values()) == {0}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_MODULES = {
    **dict.fromkeys(("ChildState", "ClusterEvent", "EventKind", "NodeProcess"), "child"),
    **dict.fromkeys(("ClusterConfig", "Supervision"), "config"),
    "Cluster": "cluster",
    "Launch": "plan",
}
"""Names, each with the module that defines it. A module is imported when one of its names is first used, since a client
needs only the settings.
"""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
