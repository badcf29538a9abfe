"""A router process or the store is killed during a stream, and the client goes on.

tests/router/test_router_process.py freezes routers in front of fake nodes.
"""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from outrider.client import Client
from outrider.cluster.child import ChildState
from outrider.cluster.config import ClusterConfig
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.cluster_nodes import wait_for_node
from tests.support.store_server import PATIENT_STORE_SETTING, StoreServer

PROMPT = [7, 3, 9, 4, 1, 8] * 8
SAMPLING = {"seed": 11, "max_tokens": 300, "ignore_eos": True, "stop": ["never said"]}
ROUTERS = ClusterConfig(port=0, routers=2)


@pytest.fixture(scope="module")
def sharing(start_cluster, tmp_path_factory):
    """Two routers with a store on a server."""
    with (
        StoreServer(tmp_path_factory.mktemp("store")) as server,
        start_cluster(ROUTERS, f"router.store={server.url}", PATIENT_STORE_SETTING) as cluster,
    ):
        cluster.wait_serving(START_SECONDS)
        running = RunningCluster(cluster)
        running.store = server
        yield running


def answer_of(stream, n):
    return [(stream.token_ids(sample), stream.text(sample), stream.finished[sample]) for sample in range(n)]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_killed_router_of_a_store_costs_a_moment(sharing, n):
    sharing.wait_until_all_serve()
    with sharing.client.generate(PROMPT, n=n, **SAMPLING) as undisturbed:
        assert sum(1 for _ in undisturbed) > 20
    arrivals = []
    num_restarts = sharing.cluster.node("router-0").num_restarts
    with Client(sharing.router_address) as client, client.generate(PROMPT, n=n, **SAMPLING) as stream:
        for _ in stream:
            arrivals.append(time.monotonic())
            if len(arrivals) == 1:  # a busy router may put all other tokens into a few messages
                sharing.cluster.kill("router-0", signal.SIGKILL)
    gap_seconds = max((later - earlier for earlier, later in itertools.pairwise(arrivals)), default=0.0)
    print(f"n={n}: {gap_seconds:.2f} s")
    assert answer_of(stream, n) == answer_of(undisturbed, n)
    assert stream.summary.usage.num_generated_tokens == n * SAMPLING["max_tokens"]
    assert gap_seconds < 5.0
    wait_for_node(
        sharing.cluster, "router-0", lambda node: node.num_restarts > num_restarts and node.state is ChildState.SERVING
    )
    sharing.client = Client(sharing.router_address)  # the old client may be connected to the killed router
    sharing.wait_until_nothing_is_held()


def test_a_lost_store_holds_up_nothing_that_runs(sharing):
    """This test is the last one, because it kills the store."""
    sharing.wait_until_all_serve()
    with Client(sharing.router_address) as client, client.generate(PROMPT, **SAMPLING) as undisturbed:
        assert sum(1 for _ in undisturbed) > 20
    gaps_seconds, last = [], time.monotonic()
    with Client(sharing.router_address) as client, client.generate(PROMPT, **SAMPLING) as stream:
        for index, _ in enumerate(stream):
            gaps_seconds.append(time.monotonic() - last)
            last = time.monotonic()
            if index == 0:
                sharing.store.kill()
    assert answer_of(stream, 1) == answer_of(undisturbed, 1)
    assert max(gaps_seconds) < 10.0  # the router waits 30 s for the store: PATIENT_STORE_SETTING
    sharing.wait_until_nothing_is_held()
