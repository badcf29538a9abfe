"""Every process of a cluster is restarted under load, one after the other, and no request fails or changes."""

from __future__ import annotations

import signal

import pytest

from outrider.cluster.config import ClusterConfig
from tests.conftest import START_SECONDS, RunningCluster
from tests.faults.matrix import assert_same
from tests.faults.requests import Request
from tests.support.cluster_nodes import wait_for_node
from tests.support.store_server import PATIENT_STORE_SETTING, StoreServer

CLUSTER = ClusterConfig(port=0, routers=2, decode_nodes=2, prefill_nodes=2)
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "draft-0", "router-0", "router-1")
REQUESTS = (("greedy", 0), ("drafts", 1), ("n = 3", 2))
ANSWER_SECONDS = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(480)]


def test_a_rolling_restart_under_load_loses_no_request(start_cluster, tmp_path):
    with (
        StoreServer(tmp_path) as server,
        start_cluster(
            CLUSTER, "server.drain_seconds=1", f"router.store={server.url}", PATIENT_STORE_SETTING
        ) as cluster,
    ):
        cluster.wait_serving(START_SECONDS)
        running = RunningCluster(cluster)

        def send():
            return [Request(running.client, kind, number) for kind, number in REQUESTS]

        undisturbed = [request.join(timeout_seconds=ANSWER_SECONDS) for request in send()]
        for name in NODES:
            pid = wait_for_node(cluster, name, lambda node: node.state.value == "serving").pid
            requests = send()
            for request in requests:
                request.wait_for_tokens(1, timeout_seconds=ANSWER_SECONDS)
            cluster.kill(name, signal.SIGTERM)
            requests += send()
            wait_for_node(cluster, name, lambda node, pid=pid: node.pid != pid and node.state.value == "serving")
            for request, expected in zip(requests, 2 * undisturbed, strict=True):
                assert_same(request.join(timeout_seconds=ANSWER_SECONDS), expected)
        running.wait_until_nothing_is_held()
