"""A router process is killed or frozen in the middle of a stream: the client goes on at the other one."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from outrider.client import Client
from outrider.cluster import ChildState, ClusterConfig
from tests import store_server
from tests.conftest import START_SECONDS, RunningCluster
from tests.store_server import STORE_PATIENCE

PROMPT = [7, 3, 9, 4, 1, 8] * 8
SAMPLING = {"seed": 11, "max_tokens": 300, "ignore_eos": True, "stop": ["never said"]}
ROUTERS = ClusterConfig(port=0, routers=2, restart_seconds=0.1)


@pytest.fixture(scope="module")
def sharing(start_cluster, tmp_path_factory):
    """Two routers with a store on a server."""
    if store_server.PROGRAM is None:
        pytest.skip(store_server.MISSING)
    with (
        store_server.StoreServer(tmp_path_factory.mktemp("store")) as server,
        start_cluster(ROUTERS, f"router.store={server.url}", STORE_PATIENCE) as cluster,
    ):
        cluster.wait_serving(START_SECONDS)
        running = RunningCluster(cluster)
        running.store = server
        yield running


@pytest.fixture(scope="module")
def separate(start_cluster):
    """Two routers without a common store."""
    with start_cluster(ROUTERS) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster)


def answer_of(stream, n):
    return [(stream.token_ids(sample), stream.text(sample), stream.finished[sample]) for sample in range(n)]


def check_goes_on(running, number, *, n, most_seconds):
    running.wait_until_all_serve()
    with running.client.generate(PROMPT, n=n, **SAMPLING) as undisturbed:
        assert sum(1 for _ in undisturbed) > 20
    arrivals = []
    restarts = running.cluster.node("router-0").num_restarts + (number is signal.SIGKILL)
    with Client(running.router_address) as client, client.generate(PROMPT, n=n, **SAMPLING) as stream:
        for _ in stream:
            arrivals.append(time.monotonic())
            if len(arrivals) == 10:
                running.cluster.kill("router-0", number)
    gap_seconds = max(later - earlier for earlier, later in itertools.pairwise(arrivals))
    print(f"{number.name}, n={n}: {gap_seconds:.2f} s")
    assert answer_of(stream, n) == answer_of(undisturbed, n)
    assert stream.summary.usage.num_generated_tokens == n * SAMPLING["max_tokens"]
    assert gap_seconds < most_seconds
    if number is signal.SIGSTOP:
        running.cluster.kill("router-0", signal.SIGCONT)
    running.cluster.wait_node(
        "router-0", lambda node: node.num_restarts >= restarts and node.state is ChildState.SERVING
    )
    running.client = Client(running.router_address)  # the old one may have a connection to the router that was killed
    running.wait_until_nothing_is_held()


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_killed_router_of_a_store_costs_a_moment(sharing, n):
    check_goes_on(sharing, signal.SIGKILL, n=n, most_seconds=5.0)


@pytest.mark.full  # tests/router/test_lost_router_processes.py has it with fake nodes
def test_a_frozen_router_of_a_store_costs_the_time_to_notice(sharing):
    check_goes_on(sharing, signal.SIGSTOP, n=2, most_seconds=20.0)


@pytest.mark.full  # tests/router/test_lost_router_processes.py has it with fake nodes
def test_without_a_common_store_one_sample_goes_on_as_well(separate):
    check_goes_on(separate, signal.SIGKILL, n=1, most_seconds=5.0)


def test_a_lost_store_holds_up_nothing_that_runs(sharing):
    """Last: the store is gone afterwards."""
    sharing.wait_until_all_serve()
    with Client(sharing.router_address) as client, client.generate(PROMPT, **SAMPLING) as undisturbed:
        assert sum(1 for _ in undisturbed) > 20
    with Client(sharing.router_address) as client, client.generate(PROMPT, **SAMPLING) as stream:
        for index, _ in enumerate(stream):
            if index == 10:
                sharing.store.kill()
    assert answer_of(stream, 1) == answer_of(undisturbed, 1)
    sharing.wait_until_nothing_is_held()
