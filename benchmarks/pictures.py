"""Takes screenshots of the router's page: docs/figures/page-cluster.png and page-request.png.

    .venv/bin/python -m benchmarks.pictures

It runs a local cluster of the default model with two decode nodes. For page-request.png, a node is killed in the
middle of the answer whose timeline is shown; for page-cluster.png, a node is frozen. Needs Chromium (`make browser`).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import outrider
from benchmarks.failover import busiest_decode_node, status_nodes, wait_for
from outrider.client import ChatMessage, Client
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch
from tests.support.chromium import screenshot

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
BEFORE_TOKENS = 24
MAX_TOKENS = 100
WIDTH = 1280
HEIGHTS = {"page-cluster.png": 560, "page-request.png": 1040}
NUM_COMPANY = 3
MOST_BYTES = 200_000
QUESTION = """Read this, and explain in your own words, in a whole paragraph, why the ship has a pilot.

A harbour is hard to enter. Sand moves under the water after each storm, so that the charts of last year are wrong, and
the tide turns faster than a long ship can. The captain knows the ship, its weight and its engines, but has not seen
this harbour for months. The pilot knows the harbour: every morning she sails it in a small boat, measures its depth,
and notes where the current has changed. So the pilot goes ahead and proposes a course, and the captain looks at each
turn before the ship takes it. Where the captain agrees, the ship goes on without slowing down. Where he does not, the
ship takes his own turn, and the pilot begins again from there. The ship never goes where the captain would not have
gone; it only arrives sooner.
"""
HEAD = Path(outrider.__file__).parent / "heads" / "smollm2-135m-eagle3"


class Stream:
    """Reads one answer in a thread."""

    def __init__(self, client: Client, text: str, max_tokens: int) -> None:
        self.num_tokens = 0
        self._client = client
        self._question = [ChatMessage("user", text)]
        self._max_tokens = max_tokens
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._client.generate(self._question, temperature=0.0, max_tokens=self._max_tokens) as stream:
            for delta in stream:
                self.num_tokens += len(delta.token_ids)
                if self._is_over.is_set():
                    break

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        """Aborts the answer if it is still running."""
        self._is_over.set()
        wait_for(lambda: self.has_ended, "an answer has not ended")


def figures(page: str, path: str) -> Any:
    with urlopen(page + path, timeout=10) as reply:  # noqa: S310 this cluster's own page
        return json.load(reply)


def take(page: str, fragment: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        screenshot(page + fragment, FIGURES / name, Path(profile), view_seconds=4.0, size=(WIDTH, HEIGHTS[name]))
    size = (FIGURES / name).stat().st_size
    print(f"docs/figures/{name}: {size:,} bytes")
    if size > MOST_BYTES:
        raise ValueError(f"{name} has {size:,} bytes, which is more than {MOST_BYTES:,}")


@contextlib.contextmanager
def company(client: Client, number: int) -> Iterator[None]:
    """Runs `number` other answers while the block runs."""
    streams = [Stream(client, f"Write a story about {index + 2} foxes.", 2000) for index in range(number)]
    try:
        wait_for(lambda: all(stream.num_tokens for stream in streams), "answers do not begin")
        yield
    finally:
        for stream in streams:
            stream.end()


def all_serve(client: Client) -> Callable[[], bool]:
    return lambda: all(node.state.name == "SERVING" for node in status_nodes(client))


def picture_request(cluster: Cluster, client: Client, page: str) -> None:
    """Takes the picture of an answer whose decode node is killed. Another answer runs at the same time."""
    with company(client, 1):
        stream = Stream(client, QUESTION, MAX_TOKENS)
        wait_for(lambda: stream.num_tokens >= BEFORE_TOKENS, "the answer does not begin")
        serial = figures(page, "api/requests")["requests"][0]["serial"]
        used = figures(page, f"api/requests/{serial}")["nodes"]
        target = next(node.target for node in status_nodes(client) if node.name in used and node.role.name == "DECODE")
        cluster.kill(next(node.name for node in cluster.nodes if node.address == target))
        wait_for(lambda: stream.has_ended, "the answer does not end")
    take(page, f"#/requests/{serial}", "page-request.png")


def picture_cluster(cluster: Cluster, client: Client, page: str) -> None:
    """Takes the picture of a cluster with running answers and one frozen decode node."""
    with company(client, NUM_COMPANY):
        frozen = busiest_decode_node(cluster, client)
        cluster.kill(frozen, signal.SIGSTOP)
        try:
            wait_for(lambda: not all_serve(client)(), "the frozen node is not missed")
            time.sleep(1.0)  # so that the other nodes' figures are newer
            take(page, "", "page-cluster.png")
        finally:
            cluster.kill(frozen, signal.SIGCONT)


def main() -> int:
    config = ClusterConfig(port=0, decode_nodes=2, draft=f"head:{HEAD}")
    with Cluster(config, Launch(overrides=("telemetry.log_text=true",))) as cluster:
        cluster.wait_serving()
        page = f"http://{cluster.node('router').metrics_address}/"
        with Client(cluster.router_address) as client:
            wait_for(all_serve(client), "nodes do not serve")
            client.complete([ChatMessage("user", "Hello")], max_tokens=8)
            picture_request(cluster, client, page)
            cluster.wait_serving()
            wait_for(all_serve(client), "the killed node does not come back")
            picture_cluster(cluster, client, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
