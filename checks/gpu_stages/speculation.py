"""What drafts of a remote draft model cost and gain, on one GPU with a target that agrees with the draft model.

Both have random weights, and they agree BY CONSTRUCTION: the draft model is the target's first layers, and the target's
other layers add nothing but their cost. So the figures show what speculation costs and could gain, not how well any
draft model predicts its target. Half of the prompts are answered greedily.

A round answers the same prompts as the others: `plain`, `drafted`, or `suspended`, in which the draft node is stopped
by SIGSTOP, so that only the decode node's lookup drafts. Rounds of different kinds alternate.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu_stages.cluster import START_SECONDS, TEMPERATURES, open_cluster
from checks.gpu_stages.day import WINDOW, Day
from outrider.cli.cluster_arguments import WITHOUT_PREFIX_CACHE
from outrider.client import Client
from outrider.cluster.cluster import Cluster

NUM_DRAFT_LAYERS = 2
NOISE = 1.08
"""A kind of round counts as slower than plain ones if its time per token is more than this many times theirs."""


def run(day: Day) -> None:
    model = day.random_model("8b half" if day.is_gpu else "tiny", draft_layers=NUM_DRAFT_LAYERS if day.is_gpu else 1)
    settings = [f"model.device={day.device}", f"model.max_model_len={WINDOW}", WITHOUT_PREFIX_CACHE]
    if not day.is_gpu:
        settings += ["model.dtype=float32", "model.kernels=torch", "kv_cache.memory=64MiB"]
        _measure(day, model, settings, batches=(2,), num_rounds=1, is_exact=True)
        return
    with day.part("speed"):
        _measure(day, model, settings, batches=(1, 4, 16), num_rounds=3)
    with day.part("deterministic"):
        _measure(day, model, [*settings, "model.deterministic=true"], batches=(8,), num_rounds=1, is_exact=True)


def _measure(
    day: Day, model: Path, settings: list[str], *, batches: Sequence[int], num_rounds: int, is_exact: bool = False
) -> None:
    """Runs rounds of each number of answers at once. `is_exact`: whether all rounds must give the same tokens."""
    started = time.monotonic()
    with (
        open_cluster(day, model, model / "draft", settings, decode_nodes=1) as cluster,
        ThreadPoolExecutor(max(batches)) as pool,
    ):
        cluster.wait_serving(START_SECONDS)
        day.tell("serving", seconds=round(time.monotonic() - started, 1), settings=settings)
        with Client(cluster.router_address) as client:
            asked = _Asked(client, pool, num_tokens=192 if day.is_gpu else 48)
            for number in batches:
                _compare(day, cluster, asked, number, num_rounds=num_rounds, is_exact=is_exact)


class _Asked:
    """Asks for answers to token ids that share no prefix with each other."""

    def __init__(self, client: Client, pool: ThreadPoolExecutor, *, num_tokens: int) -> None:
        self._client, self._pool, self.num_tokens = client, pool, num_tokens

    def answers(self, number: int, *, speculation: bool) -> list[Any]:
        return list(self._pool.map(lambda index: self._answer(index, speculation=speculation), range(number)))

    def _answer(self, index: int, *, speculation: bool) -> Any:
        return self._client.complete(
            [(place * 37 + index * 101) % 900 + 3 for place in range(self.num_tokens)],
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=index,
            ignore_eos=True,
            max_tokens=self.num_tokens,
            speculation=speculation,
        )


def _compare(day: Day, cluster: Cluster, asked: _Asked, number: int, *, num_rounds: int, is_exact: bool) -> None:
    """Tells each kind's figures for `number` answers at once."""
    found: dict[str, list[list[Any]]] = {"plain": [], "drafted": [], "suspended": []}

    def rounds(kind: str) -> None:
        for _ in range(num_rounds):
            for each in ("plain", kind):
                found[each].append(asked.answers(number, speculation=each != "plain"))

    asked.answers(number, speculation=True)  # warm-up
    rounds("drafted")
    cluster.kill("draft-0", signal.SIGSTOP)
    try:
        rounds("suspended")
    finally:
        cluster.kill("draft-0", signal.SIGCONT)
    times = {}
    for kind, answers in found.items():
        times[kind] = median(_ms_a_token(each, asked.num_tokens) for each in answers)
        share = _share_of_same(found["plain"][0], answers)
        counts = [each.summary.metrics.speculation for results in answers for each in results]
        num_drafts = sum(each.num_spec_steps for each in counts)
        num_tokens = sum(each.num_draft_tokens for each in counts)
        num_accepted = sum(each.num_accepted_draft_tokens for each in counts)
        day.tell(
            kind,
            agreement="by construction",
            at_once=number,
            ms_a_token=round(times[kind], 3),
            rounds_ms=[round(_ms_a_token(each, asked.num_tokens), 3) for each in answers],
            times_plain=round(times[kind] / times["plain"], 2),
            same=round(share, 3),
            accepted=round(num_accepted / num_tokens, 3) if num_tokens else None,
            tokens_a_draft=round(num_accepted / num_drafts, 2) if num_drafts else None,
            drafts_a_token=round(num_drafts / (len(counts) * asked.num_tokens), 3),
        )
        if is_exact:
            day.expect(f"{kind}: {share:.3f} of the tokens are the same", share == 1.0)
        elif day.is_gpu:
            day.expect(f"{number} answers at once, {kind}: slower than plain", times[kind] <= NOISE * times["plain"])


def _ms_a_token(results: Sequence[Any], num_tokens: int) -> float:
    metrics = [each.summary.metrics for each in results]
    return 1e3 * median((each.e2e_seconds - each.ttft_seconds) / num_tokens for each in metrics)


def _share_of_same(expected: Sequence[Any], rounds: Sequence[Sequence[Any]]) -> float:
    """Returns the share of tokens that are the same as in `expected` at their position."""
    pairs = [
        one == other
        for results in rounds
        for first, second in zip(expected, results, strict=True)
        for one, other in zip(first.completions[0].token_ids, second.completions[0].token_ids, strict=True)
    ]
    return sum(pairs) / len(pairs)
