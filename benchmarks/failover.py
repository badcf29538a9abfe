"""Measures the gap in clients' streams when a decode node is killed or stopped in the middle of their answers.

    .venv/bin/python benchmarks/failover.py --rounds 5

It runs local clusters of the default model. Of two decode nodes, the busier one is lost. Before the next
round, the supervisor restarts a killed node, and this script continues a stopped one. Prompts are computed
once beforehand. So all streams start together, have contexts of about the same length when the node is lost,
and recompute only generated tokens elsewhere. `--cold` skips this warm-up.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.client import Client, GenerateOptions
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch
from outrider.node import NodeRole, NodeStatus

CONTEXT_TOKENS = 500
BEFORE_TOKENS = 16
AFTER_TOKENS = 16
MAX_TOKENS = 1400  # enough that no answer ends while others start
WAIT_SECONDS = 120.0
LIMITS = {"killed": 1.0, "stopped": 1.5, "stopped, 16 streams": 3.0, "killed, the only one": 5.5}
"""Maximum permitted gap in each case, in seconds."""
LOSSES = {
    2: {
        "killed": (signal.SIGKILL, 1),
        "stopped": (signal.SIGSTOP, 1),
        "stopped, 16 streams": (signal.SIGSTOP, 16),
    },
    1: {"killed, the only one": (signal.SIGKILL, 1)},
}
"""The cases, by the cluster's number of decode nodes. Each has the signal to send and the number of streams."""


def prompt_of(number: int) -> list[int]:
    return [(index * 37 + number * 101) % 20_000 + 300 for index in range(CONTEXT_TOKENS)]


class Stream:
    """Reads one greedy answer in a thread, and records the arrival times of its deltas."""

    def __init__(self, client: Client, number: int) -> None:
        self.arrivals: list[float] = []
        self.num_tokens = 0
        self._client = client
        self._number = number
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        prompt = prompt_of(self._number)
        options = GenerateOptions(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        with self._client.generate(prompt, **options) as stream:
            for delta in stream:
                if delta.token_ids:
                    self.arrivals.append(time.monotonic())
                    self.num_tokens += len(delta.token_ids)
                if self._is_over.is_set():
                    break

    def gap(self, since: float) -> float | None:
        """Returns the longest pause between deltas, from the last before `since` onwards; None if too few follow."""
        before = [at for at in self.arrivals if at <= since]
        after = [at for at in self.arrivals if at > since]
        if not before or len(after) < AFTER_TOKENS:
            return None
        times = [before[-1], *after]
        return max(later - earlier for earlier, later in pairwise(times))

    def end(self) -> None:
        """Aborts the answer."""
        self._is_over.set()
        self._thread.join(WAIT_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError("an answer has not ended")


def busiest_decode_node(cluster: Cluster, client: Client) -> str:
    decodes = [node for node in status_nodes(client) if node.role is NodeRole.DECODE]
    target = max(decodes, key=lambda node: node.load.num_running).target
    return next(node.name for node in cluster.nodes if node.address == target)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


def lose(
    cluster: Cluster, client: Client, *, number: signal.Signals, num_streams: int, first: int, is_cold: bool
) -> list[float]:
    """Sends a signal to the busiest decode node while streams run. Returns the gap of each stream, in seconds."""
    for index in range(0 if is_cold else num_streams):
        client.complete(prompt_of(first + index), max_tokens=1)
    streams = [Stream(client, first + index) for index in range(num_streams)]
    wait_for(lambda: all(stream.num_tokens >= BEFORE_TOKENS for stream in streams), "streams do not begin")
    name = busiest_decode_node(cluster, client)
    since = time.monotonic()
    cluster.kill(name, number)
    wait_for(lambda: all(stream.gap(since) is not None for stream in streams), "streams do not go on")
    gaps = [stream.gap(since) or 0.0 for stream in streams]
    if number is signal.SIGSTOP:
        cluster.kill(name, signal.SIGCONT)
    for stream in streams:
        stream.end()
    cluster.wait_serving()
    wait_for(lambda: all(node.state.name == "SERVING" for node in status_nodes(client)), "nodes do not come back")
    return gaps


def status_nodes(client: Client) -> tuple[NodeStatus, ...]:
    statuses = client.watch_cluster()
    try:
        return next(statuses).nodes
    finally:
        statuses.close()


def measure(num_decode_nodes: int, ways: dict[str, tuple[signal.Signals, int]], rounds: int, *, is_cold: bool) -> None:
    config = ClusterConfig(port=0, decode_nodes=num_decode_nodes)
    with Cluster(config, Launch()) as cluster, Client(cluster.router_address) as client:
        first = 0
        for way, (number, num_streams) in ways.items():
            longest = []
            for _ in range(rounds):
                gaps = lose(cluster, client, number=number, num_streams=num_streams, first=first, is_cold=is_cold)
                first += num_streams
                longest.append(max(gaps))
                print(f"  {way}: {', '.join(f'{gap:.2f}' for gap in sorted(gaps))} s", flush=True)
            print(
                f"{way}: longest gap, median of {rounds} rounds {median(longest):.2f} s, "
                f"from {min(longest):.2f} to {max(longest):.2f}; asked: under {LIMITS[way]:g} s",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="streams begin as their prompts are computed")
    parser.add_argument("--only", action="append", choices=tuple(LIMITS), help="only this loss; may be repeated")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    wanted = arguments.only or tuple(LIMITS)
    for num_decode_nodes, losses in LOSSES.items():
        ways = {way: loss for way, loss in losses.items() if way in wanted}
        if ways:
            measure(num_decode_nodes, ways, arguments.rounds, is_cold=arguments.cold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
