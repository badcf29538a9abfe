"""Measures the time that the OpenAI gateway adds to a one-token answer by HTTP and by OpenAI's SDK, compared to gRPC.

    .venv/bin/python benchmarks/openai_gateway.py --rounds 300

It runs a local cluster of the default model and sends the same short chat each time, so that the prompt is cached.
Times are those of a client with an open connection. gRPC, HTTP and the SDK take turns, in an order that changes from
round to round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.client import ChatMessage, Client
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig

QUESTION = "Why is the sky blue?"
WARM_UP_ROUNDS = 20
WAIT_SECONDS = 60.0
LIMIT_MS = 3.0
"""Maximum time that the gateway may add to the median, in milliseconds."""


def by_http(url: str, model: str) -> Callable[[], None]:
    """Returns a function that sends a request over a persistent connection, as curl does with several URLs."""
    address, path = url.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1, "temperature": 0}
    )

    def ask() -> None:
        connection.request("POST", f"/{path}/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert json.load(answer)["usage"]["completion_tokens"] == 1

    return ask


def measure(cluster: Cluster, num_rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of all requests, by client."""
    url = cluster.openai_url
    with (
        Client(cluster.router_address) as client,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_SECONDS) as sdk,
    ):
        model = client.model().name
        askers: dict[str, Callable[[], object]] = {
            "gRPC": lambda: client.complete([ChatMessage("user", QUESTION)], max_tokens=1, temperature=0.0),
            "HTTP": by_http(url, model),
            "SDK": lambda: sdk.chat.completions.create(
                model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=1, temperature=0
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in askers}
        for number in range(WARM_UP_ROUNDS + num_rounds):
            names = list(askers)
            for name in names[number % 3 :] + names[: number % 3]:
                started = time.perf_counter()
                askers[name]()
                if number >= WARM_UP_ROUNDS:
                    times[name].append((time.perf_counter() - started) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    sys.stdout.write(f"{describe_machine()}\n")
    with Cluster(ClusterConfig(port=0, openai_port=0)) as cluster:
        times = measure(cluster, arguments.rounds)
    direct = median(times["gRPC"])
    sys.stdout.write("| client | median | 10 % | 90 % | more than gRPC |\n| -- | -- | -- | -- | -- |\n")
    for name, values in times.items():
        tenths = quantiles(values, n=10)
        sys.stdout.write(
            f"| {name} | {median(values):.2f} ms | {tenths[0]:.2f} | {tenths[-1]:.2f} "
            f"| {median(values) - direct:+.2f} ms |\n"
        )
    added = median(times["HTTP"]) - direct
    sys.stdout.write(f"asked: at most {LIMIT_MS:g} ms by HTTP; seen: {added:.2f} ms\n")
    return 0 if added <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
