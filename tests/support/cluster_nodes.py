"""Waiting for the nodes of a cluster."""

from __future__ import annotations


def wait_for_node(cluster, name, condition, *, timeout_seconds=60.0):
    """Waits until the supervisor sees the node fulfil the condition, and returns its NodeProcess."""
    with cluster._changed:
        reached = cluster._changed.wait_for(lambda: condition(cluster.node(name)), timeout_seconds)
        assert reached, f"{name} is {cluster.node(name).state.value} after {timeout_seconds} s"
        return cluster.node(name)
