"""Whether resident memory grows with the number of requests: a local cluster on a tiny model.

    .venv/bin/python benchmarks/memory.py --requests 2500 --clients 16

Prints each process's resident memory (MiB) after every 500 requests, and its growth from
the first of these to the last. A tiny model answers in milliseconds, so what remains is
what serving itself leaves behind. Allocators can be compared by their own variables:
`MALLOC_ARENA_MAX=1 .venv/bin/python benchmarks/memory.py`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from outrider.client import Client
from outrider.cluster import Cluster, ClusterConfig, Launch
from outrider.model_hub.tiny import make_tiny_model

MIB = 1 << 20
STEP = 500
PROMPT_TOKENS = 96
NEW_TOKENS = 8


def main() -> int:
    """0: no process grew by more than `--limit` percent; 1: one did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2500, help="how many in all; at least 1000 (default 2500)")
    parser.add_argument("--clients", type=int, default=16, help="how many at once (default 16)")
    parser.add_argument("--limit", type=float, default=2.0, help="percent of growth that is too much (default 2)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one setting; repeatable")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory))
        overrides = (f"model.id={model}", "model.num_threads=1", *arguments.set)
        with Cluster(ClusterConfig(port=0, draft_nodes=1), Launch(overrides=overrides)) as cluster:
            rows = measure(cluster, num_requests=arguments.requests, num_clients=arguments.clients)
    growth = {name: 100.0 * (rows[-1][name] / rows[0][name] - 1.0) for name in rows[0]}
    print("growth    " + "  ".join(f"{name} {percent:+.1f} %" for name, percent in growth.items()))
    return int(any(percent > arguments.limit for percent in growth.values()))


def measure(cluster: Cluster, *, num_requests: int, num_clients: int) -> list[dict[str, float]]:
    """Resident MiB by process, after every STEP requests."""
    rows = []
    with Client(cluster.router_address) as client:
        for done in range(STEP, num_requests + 1, STEP):
            run_requests(client, range(done - STEP, done), num_clients)
            memory = {node.name: psutil.Process(node.pid).memory_info().rss / MIB for node in cluster.nodes}
            rows.append(memory)
            print(f"{done:>8}  " + "  ".join(f"{name} {mib:.1f}" for name, mib in memory.items()), flush=True)
    return rows


def run_requests(client: Client, numbers: range, num_clients: int) -> None:
    """Each with a prompt of its own, so that every one is prefilled and handed off."""
    queue = iter(numbers)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            with lock:
                number = next(queue, None)
            if number is None:
                return
            tokens = [3 + (number * 7919 + i * 31 + number // 300 * i) % 300 for i in range(PROMPT_TOKENS)]
            try:
                client.complete(tokens, max_tokens=NEW_TOKENS, seed=number, ignore_eos=True)
            except Exception as error:  # noqa: BLE001 told by the main thread
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in itertools.islice(failures, 1):
        raise failure


if __name__ == "__main__":
    sys.exit(main())
