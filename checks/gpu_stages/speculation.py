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
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu_stages.cluster import START_SECONDS, TEMPERATURES, open_cluster
from checks.gpu_stages.counters import describe_decoding, describe_drafting, read_counters
from checks.gpu_stages.day import WINDOW, Day
from outrider.cli.cluster_arguments import WITHOUT_PREFIX_CACHE
from outrider.client import Client
from outrider.cluster.child import ClusterEvent, EventKind
from outrider.cluster.cluster import Cluster

NUM_DRAFT_LAYERS = 2
NOISE = 1.08
"""A kind of round counts as slower than plain ones if its time per token is more than this many times theirs."""
PLAIN, DRAFTED, SUSPENDED = "plain", "drafted", "suspended"


def run(day: Day) -> None:
    model = day.random_model("8b half" if day.is_gpu else "tiny", draft_layers=NUM_DRAFT_LAYERS if day.is_gpu else 1)
    settings = [f"model.device={day.device}", f"model.max_model_len={WINDOW}", WITHOUT_PREFIX_CACHE]
    if not day.is_gpu:
        settings += ["model.dtype=float32", "model.kernels=torch", "kv_cache.memory=64MiB"]
        _measure(day, model, settings, batches=(2,), num_rounds=1, is_exact=True)
        return
    with day.part("speed"):
        _measure(day, model, settings, batches=(1, 4, 16), num_rounds=2)
    with day.part("deterministic"):  # and with the look-ahead that a cluster switches off on a shared GPU
        settings += ["model.deterministic=true", "draft_node.look_ahead=auto"]
        _measure(day, model, settings, batches=(4,), num_rounds=2, is_exact=True)


def _measure(
    day: Day, model: Path, settings: list[str], *, batches: Sequence[int], num_rounds: int, is_exact: bool = False
) -> None:
    """Runs rounds of each number of answers at once. `is_exact`: whether all rounds must give the same tokens."""
    started, reached = time.monotonic(), defaultdict[str, dict[str, float]](dict)

    def note(event: ClusterEvent) -> None:
        stage = event.message if event.kind is EventKind.PROGRESS else event.kind.value
        reached[event.name][stage] = round(time.monotonic() - started, 1)

    cluster = open_cluster(day, model, model / "draft", settings, decode_nodes=1)
    cluster.on_event = note
    with cluster, ThreadPoolExecutor(max(batches)) as pool:
        cluster.wait_serving(START_SECONDS)
        # Seconds until the last report of each stage of each node's start. In stage `gpu` a node waits for others.
        day.tell("serving", settings=settings, reached=reached)
        with Client(cluster.router_address) as client:
            rounds = Rounds(cluster, client, pool, num_tokens=128 if day.is_gpu else 48)
            for number in batches:
                _compare(day, rounds, number, num_rounds=num_rounds, is_exact=is_exact)


@dataclass(slots=True)
class Rounds:
    """Answers of one cluster by kind of round, and what its nodes counted meanwhile."""

    cluster: Cluster
    client: Client
    pool: ThreadPoolExecutor
    num_tokens: int  # of a prompt, and of an answer
    answers: defaultdict[str, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))
    spent: defaultdict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def run(self, kind: str, number: int) -> None:
        """Asks for `number` answers at once, to prompts that share no prefix with each other."""
        names = ("decode-0", "draft-0") if kind == DRAFTED else ("decode-0",)  # a suspended node does not answer
        before = {name: read_counters(self.cluster, name) for name in names}
        found = self.pool.map(lambda index: self._answer(index, speculation=kind != PLAIN), range(number))
        self.answers[kind].append(list(found))
        for name in names:
            counters = read_counters(self.cluster, name)
            counters.subtract(before[name])
            self.spent[kind, name].update(counters)

    def _answer(self, index: int, *, speculation: bool) -> Any:
        return self.client.complete(
            [(place * 37 + index * 101) % 900 + 3 for place in range(self.num_tokens)],
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=index,
            ignore_eos=True,
            max_tokens=self.num_tokens,
            speculation=speculation,
        )

    def ms_a_token(self, results: Sequence[Any]) -> float:
        metrics = [each.summary.metrics for each in results]
        return 1e3 * median((each.e2e_seconds - each.ttft_seconds) / self.num_tokens for each in metrics)

    def same(self, kind: str) -> float:
        """Returns the share of tokens that are the same as in the first plain round at their position."""
        expected = [each.completions[0].token_ids for each in self.answers[PLAIN][0]]
        pairs = [
            one == other
            for results in self.answers[kind]
            for tokens, each in zip(expected, results, strict=True)
            for one, other in zip(tokens, each.completions[0].token_ids, strict=True)
        ]
        return sum(pairs) / len(pairs)


def _compare(day: Day, rounds: Rounds, number: int, *, num_rounds: int, is_exact: bool) -> None:
    """Tells each kind's figures for `number` answers at once."""
    rounds.run(DRAFTED, number)  # warm-up
    rounds.answers.clear()
    rounds.spent.clear()
    for kind in [PLAIN, DRAFTED] * num_rounds:
        rounds.run(kind, number)
    rounds.cluster.kill("draft-0", signal.SIGSTOP)
    try:
        for kind in [PLAIN, SUSPENDED] * num_rounds:
            rounds.run(kind, number)
    finally:
        rounds.cluster.kill("draft-0", signal.SIGCONT)
    times = {kind: [rounds.ms_a_token(each) for each in answers] for kind, answers in rounds.answers.items()}
    for kind, answers in rounds.answers.items():
        counts = [each.summary.metrics.speculation for results in answers for each in results]
        num_drafts = sum(each.num_spec_steps for each in counts)
        num_tokens = sum(each.num_draft_tokens for each in counts)
        num_accepted = sum(each.num_accepted_draft_tokens for each in counts)
        slower = median(times[kind]) / median(times[PLAIN])
        same = rounds.same(kind)
        day.tell(
            kind,
            agreement="by construction",
            at_once=number,
            ms_a_token=round(median(times[kind]), 3),
            rounds_ms=[round(each, 3) for each in times[kind]],
            times_plain=round(slower, 2),
            same=round(same, 3),
            accepted=round(num_accepted / num_tokens, 3) if num_tokens else None,
            tokens_a_draft=round(num_accepted / num_drafts, 2) if num_drafts else None,
            drafts_a_token=round(num_drafts / (len(counts) * rounds.num_tokens), 3),
            decode=describe_decoding(rounds.spent[kind, "decode-0"]),
            draft=describe_drafting(rounds.spent[kind, "draft-0"]) if kind == DRAFTED else None,
        )
        if is_exact:
            day.expect(f"{kind}: {same:.3f} of the tokens are the same", same == 1.0)
        elif day.is_gpu:
            day.expect(f"{number} at once, {kind}: {slower:.2f} times the time of plain answers", slower <= NOISE)
