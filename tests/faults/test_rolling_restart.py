"""Every process of a cluster is stopped and started again under load, one after the other: no request notices."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from outrider.client import Client
from outrider.cluster import ClusterConfig
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.cluster_nodes import wait_for_node
from tests.support.store_server import STORE_PATIENCE, StoreServer

PROMPTS = tuple([seed + 3, 5, 9, 4, 1, 8] * 10 for seed in range(3))
SAMPLING = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.9}
CLUSTER = ClusterConfig(port=0, routers=2, decode_nodes=2, prefill_nodes=2)
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "draft-0", "router-0", "router-1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def elastic(is_full, start_cluster, tmp_path_factory):
    if not is_full:
        pytest.skip("every process in turn: make test-all")
    with (
        StoreServer(tmp_path_factory.mktemp("store")) as server,
        start_cluster(CLUSTER, "server.drain_seconds=1", f"router.store={server.url}", STORE_PATIENCE) as cluster,
    ):
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster)


class Load(threading.Thread):
    """Streams one prompt again and again, and keeps each answer."""

    def __init__(self, target: str, number: int) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._number = number
        self._stopping = threading.Event()
        self.answers: list[tuple] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(self._target) as client:
                while not self._stopping.is_set():
                    with client.generate(PROMPTS[self._number], seed=self._number, **SAMPLING) as stream:
                        for _ in stream:
                            pass
                    self.answers.append((stream.token_ids(), stream.text(), stream.finished[0]))
        except BaseException as error:  # noqa: BLE001 shown by the test
            self.error = error

    def end(self) -> None:
        self._stopping.set()
        self.join(60.0)
        assert not self.is_alive(), "a stream hangs"


def test_a_rolling_restart_under_load_loses_no_request(elastic):
    loads = [Load(elastic.router_address, number) for number in range(len(PROMPTS))]
    for load in loads:
        load.start()
    for name in NODES:
        served = [len(load.answers) for load in loads]
        pid = wait_for_node(elastic.cluster, name, lambda node: node.state.value == "serving").pid
        elastic.cluster.kill(name, signal.SIGTERM)
        deadline = time.monotonic() + 60.0
        wait_for_node(elastic.cluster, name, lambda node, pid=pid: node.pid != pid and node.state.value == "serving")
        while any(len(load.answers) == num for load, num in zip(loads, served, strict=True)):
            assert time.monotonic() < deadline, f"no answer since {name} was stopped"
            assert not any(load.error for load in loads), [load.error for load in loads]
            time.sleep(0.05)  # polls threads
    for load in loads:
        load.end()
    assert [load.error for load in loads] == [None] * len(loads)
    for load in loads:
        assert len(load.answers) > len(NODES)
        assert all(answer == load.answers[0] for answer in load.answers)
    elastic.wait_until_nothing_is_held()
