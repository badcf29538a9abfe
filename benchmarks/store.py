"""What a common store of the routers adds to the time to first token.

    .venv/bin/python benchmarks/store.py --requests 300

Two local clusters of a tiny model, one with the store in its router's memory, one with a server
of Valkey's protocol. Requests go to both in turn, one at a time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.client import Client
from outrider.cluster import Cluster, ClusterConfig, Launch
from outrider.model_hub.tiny import make_tiny_model
from tests.store_server import MISSING, PROGRAM, StoreServer

START_SECONDS = 120.0
NUM_WARM_UP = 20
PROMPT_TOKENS = 40
MAX_TOKENS = 8


def ttft_milliseconds(client: Client, number: int) -> float:
    prompt = [(index * 37 + number * 101) % 200 + 20 for index in range(PROMPT_TOKENS)]
    with client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
        for _ in stream:
            pass
        assert stream.summary is not None
        return 1e3 * stream.summary.metrics.ttft_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="to each of the two clusters")
    arguments = parser.parse_args()
    if PROGRAM is None:
        print(MISSING, file=sys.stderr)
        return 1
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-store-")))
        model = make_tiny_model(folder / "model")
        server = stack.enter_context(StoreServer(folder))
        clients = {}
        for name, store in (("memory", "memory"), ("server", server.url)):
            overrides = (f"model.id={model}", "model.num_threads=1", f"router.store={store}")
            cluster = stack.enter_context(Cluster(ClusterConfig(port=0), Launch(overrides=overrides)))
            cluster.wait_serving(START_SECONDS)
            clients[name] = stack.enter_context(Client(cluster.router_address))
        found: dict[str, list[float]] = {name: [] for name in clients}
        for number in range(NUM_WARM_UP + arguments.requests):
            for name, client in clients.items():
                milliseconds = ttft_milliseconds(client, number)
                if number >= NUM_WARM_UP:
                    found[name].append(milliseconds)
    for name, values in found.items():
        print(f"{name}: TTFT median {median(values):.2f} ms, p90 {quantiles(values, n=10)[-1]:.2f} ms")
    print(
        f"the server adds {median(found['server']) - median(found['memory']):.2f} ms to the median; asked: under 1 ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
