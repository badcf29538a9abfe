"""Runs a router, prefill node, draft model and two decode nodes on one GPU, in deterministic mode.

Answers must be the same with drafts and without, and after `kill -9` of a decode node during the answers.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu_stages.day import WINDOW, Day
from outrider.cli.cluster_arguments import WITHOUT_PREFIX_CACHE, add_cluster_arguments
from outrider.cli.up import make_cluster
from outrider.client import Client
from outrider.cluster.cluster import Cluster
from outrider.errors import OutriderError

START_SECONDS = 100.0
NUM_ANSWERS = 8
TEMPERATURES = (0.0, 0.8)
KILL_SHARE = 0.4
"""Share of the previous answers' duration after which a node is killed, so that all answers are in progress."""


def run(day: Day) -> None:
    model = day.random_model("0.5b" if day.is_gpu else "tiny")
    settings = [f"model.device={day.device}", f"model.max_model_len={WINDOW}", WITHOUT_PREFIX_CACHE]
    if not day.is_gpu:
        _ask(day, model, [*settings, "model.dtype=float32", "model.kernels=torch", "kv_cache.memory=64MiB"])
        return
    settings += ["model.deterministic=true"]
    try:
        _ask(day, model, settings)
    except OutriderError as error:  # the default sizes, which users get, do not work
        day.expect(f"a cluster on one GPU with default memory: {error}", False)
        _ask(day, model, [*settings, "kv_cache.memory=4GiB"])


def _ask(day: Day, model: Path, settings: list[str]) -> None:
    started = time.monotonic()
    with open_cluster(day, model, model, settings, decode_nodes=2) as cluster:
        cluster.wait_serving(START_SECONDS)
        described = next(dict(node.description) for node in cluster.nodes if node.role == "decode_node")
        day.tell("serving", seconds=round(time.monotonic() - started, 1), settings=settings, decode_node=described)
        num_tokens, prompt_tokens = (256, 2000) if day.is_gpu else (128, 60)
        with Client(cluster.router_address) as client, ThreadPoolExecutor(NUM_ANSWERS) as pool:

            def answer(number: int, *, speculation: bool) -> Any:
                """Completes token ids that share no prefix with the other prompts."""
                return client.complete(
                    [(index * 37 + number * 101) % 900 + 3 for index in range(prompt_tokens)],
                    temperature=TEMPERATURES[number % len(TEMPERATURES)],
                    seed=number,
                    ignore_eos=True,
                    max_tokens=num_tokens,
                    speculation=speculation,
                )

            def answers(*, speculation: bool, kill_after: float = 0.0) -> list[Any]:
                asked = [pool.submit(answer, number, speculation=speculation) for number in range(NUM_ANSWERS)]
                if kill_after:
                    time.sleep(kill_after)
                    cluster.kill("decode-0")
                return [each.result() for each in asked]

            answers(speculation=True)  # warm-up, since the first answers compile and allocate
            plain = answers(speculation=False)
            _tell(day, "plain", plain, plain, num_tokens)
            drafted = answers(speculation=True)
            _tell(day, "drafted", plain, drafted, num_tokens)
            seconds = median(each.summary.metrics.e2e_seconds for each in drafted)
            killed = answers(speculation=True, kill_after=KILL_SHARE * seconds)
            _tell(day, "killed", plain, killed, num_tokens)


def _tell(day: Day, kind: str, expected: list[Any], results: list[Any], num_tokens: int) -> None:
    same = sum(
        one.completions[0].token_ids == other.completions[0].token_ids
        for one, other in zip(expected, results, strict=True)
    )
    metrics = [each.summary.metrics for each in results]
    transfers = [each.kv_transfer for each in metrics]
    day.tell(
        kind,
        same=same,
        of=len(expected),
        attempts=[each.attempts for each in metrics],
        acceptance=[round(each.speculation.mean_acceptance_length, 2) for each in metrics],
        ttft_ms=round(1e3 * median(each.ttft_seconds for each in metrics), 1),
        ms_a_token=round(1e3 * median((each.e2e_seconds - each.ttft_seconds) / num_tokens for each in metrics), 3),
        connector=transfers[0].connector,
        kv_mib=round(transfers[0].bytes / (1 << 20), 1),
        kv_ms=round(1e3 * median(each.seconds for each in transfers), 2),
    )
    day.expect(f"{kind}: {same} of {len(expected)} answers have the same tokens", same == len(expected))
    if kind == "killed":
        day.expect("no answer was interrupted by the kill", any(each.attempts > 1 for each in metrics))


def open_cluster(day: Day, model: Path, draft: Path, settings: list[str], *, decode_nodes: int) -> Cluster:
    """Makes a cluster as `outrider up` does. `draft`: the draft model."""
    day.logs.mkdir(parents=True, exist_ok=True)
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser, port=0)
    command = ["--model", str(model), "--draft", f"draft_model:{draft}"]
    command += ["--decode-nodes", str(decode_nodes)]
    command += ["--log-dir", str(day.logs)]
    for setting in settings:
        command += ["--set", setting]
    return make_cluster(parser.parse_args(command))
