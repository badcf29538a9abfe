"""`outrider demo`: answers three prompts with and without speculation, and one while its decode node is killed."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from outrider import __version__
from outrider.bench.load import RequestRecord
from outrider.bench.measure import gaps, stream_rate
from outrider.cli.cluster_arguments import WITHOUT_PREFIX_CACHE, add_cluster_arguments
from outrider.cli.up import announce_serving, make_cluster
from outrider.client import ChatMessage, Client, GenerateOptions
from outrider.client.replay import describe_gap
from outrider.cluster.child import ClusterEvent, EventKind
from outrider.cluster.cluster import Cluster
from outrider.cluster.event_printer import EventPrinter
from outrider.errors import NotFoundError
from outrider.node import NodeRole

STOP_LIMIT_SECONDS = 5.0
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    name: str
    text: str
    options: GenerateOptions

    @property
    def messages(self) -> list[ChatMessage]:
        return [ChatMessage("user", self.text)]


DEMO_PROMPTS = tuple(
    DemoPrompt(**json.loads(line)) for line in Path(__file__).with_name("demo_prompts.jsonl").open(encoding="utf-8")
)
"""Prompts of different kinds, each of about 240 tokens in the default model's chat template. One uses sampling."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser, port=0)
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=f"default {DEFAULT_MAX_TOKENS}"
    )


def run(arguments: argparse.Namespace) -> int:
    arguments.overrides = [WITHOUT_PREFIX_CACHE, *arguments.overrides]
    printer = EventPrinter(sys.stdout)
    cluster = make_cluster(arguments)
    cluster.on_event = lambda event: _show(printer, event)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    printer.say(f"outrider {__version__} demo; logs in {cluster.log_directory}")
    with cluster:
        announce_serving(cluster, printer)
        with Client(cluster.router_address) as client:
            pairs = [_answer_twice(client, prompt, arguments.max_tokens) for prompt in DEMO_PROMPTS]
            survivor = _answer_with_killed_node(cluster, client, DEMO_PROMPTS[0], pairs[0][0])
            twins = [*zip(DEMO_PROMPTS, pairs, strict=True), (DEMO_PROMPTS[0], (survivor, pairs[0][0]))]
            partings = [_describe_difference(client, prompt, *pair) for prompt, pair in twins]
        stopped_at = time.monotonic()
        statuses = cluster.stop()
        stop_seconds = time.monotonic() - stopped_at
    _print_table(pairs)
    for parting in filter(None, partings):
        printer.say(parting)
    is_clean = all(status == 0 for status in statuses.values()) and stop_seconds <= STOP_LIMIT_SECONDS
    ends = (
        "all with status 0" if not any(statuses.values()) else f"statuses {statuses}, logs in {cluster.log_directory}"
    )
    printer.say(f"services stopped in {stop_seconds:.1f} s, {ends}")
    is_identical = all(one.token_ids == other.token_ids for _, (one, other) in twins)
    printer.say(summary_line(pairs, survivor, is_identical=is_identical))
    return 0 if is_identical and is_clean else 1


def summary_line(
    pairs: Sequence[tuple[RequestRecord, RequestRecord]], survivor: RequestRecord, *, is_identical: bool
) -> str:
    """Returns the demo's last line; every figure is measured."""
    num_steps = sum(fast.metrics.speculation.num_spec_steps for fast, _ in pairs)
    num_accepted = sum(fast.metrics.speculation.num_accepted_draft_tokens for fast, _ in pairs)
    fast_rate, plain_rate = (_rate(answers) for answers in zip(*pairs, strict=True))
    return (
        f"demo: identical={'yes' if is_identical else 'no'} requests={2 * len(pairs) + 1} "
        f"mean_acceptance_length={1 + num_accepted / num_steps if num_steps else 1.0:.2f} "
        f"speedup={fast_rate / plain_rate if plain_rate else 0.0:.2f} "
        f"failover_gap_seconds={max(gaps(survivor), default=0.0):.2f}"
    )


def _rate(answers: Sequence[RequestRecord]) -> float:
    """Returns tokens per second after the first token, over all answers."""
    seconds = sum(sum(gaps(answer)) for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / seconds if seconds > 0 else 0.0


def _answer_twice(client: Client, prompt: DemoPrompt, max_tokens: int) -> tuple[RequestRecord, RequestRecord]:
    """Returns the answers with and without speculation."""
    sys.stdout.write(f"\n=== {prompt.name} ===\n{prompt.text}\n")
    return (
        _answer(client, prompt, max_tokens, has_speculation=True),
        _answer(client, prompt, max_tokens, has_speculation=False),
    )


def _answer_with_killed_node(
    cluster: Cluster, client: Client, prompt: DemoPrompt, twin: RequestRecord
) -> RequestRecord:
    """Repeats the twin's request. After half of the answer, kills the decode node that computes it."""
    is_alive = True

    def kill(num_tokens: int) -> None:
        nonlocal is_alive
        if is_alive and 2 * num_tokens >= len(twin.token_ids):
            is_alive = False
            cluster.kill(_busiest_decode_node(cluster, client), signal.SIGKILL)

    sys.stdout.write(f"\n=== {prompt.name} again; its decode node will be killed (SIGKILL) ===\n")
    answer = _answer(client, prompt, len(twin.token_ids), has_speculation=True, on_tokens=kill)
    cluster.wait_serving()  # stopping a node during its start would change its exit status
    return answer


def _busiest_decode_node(cluster: Cluster, client: Client) -> str:
    """Returns the name of the decode node with the most running sequences. Raises: NotFoundError."""
    with contextlib.closing(client.watch_cluster()) as statuses:
        decodes = next(statuses).by_role()[NodeRole.DECODE]
    target = max(decodes, key=lambda node: node.load.num_running).target
    for node in cluster.nodes:
        if node.address == target:
            return node.name
    raise NotFoundError(f"decode node {target} is not of this cluster")


def _answer(
    client: Client,
    prompt: DemoPrompt,
    max_tokens: int,
    *,
    has_speculation: bool,
    on_tokens: Callable[[int], None] = lambda _num_tokens: None,
) -> RequestRecord:
    """Requests and prints an answer. `on_tokens` is called after each delta with the number of tokens so far."""
    sys.stdout.write(f"\n--- {prompt.name}, {_mode(has_speculation=has_speculation)} ---\n")
    sys.stdout.flush()
    options = _options(prompt, max_tokens, has_speculation=has_speculation)
    sent_at = time.monotonic()
    arrivals: list[tuple[float, int]] = []
    with client.generate(prompt.messages, **options) as stream:
        for delta in stream:
            if delta.token_ids:
                arrivals.append((time.monotonic(), len(delta.token_ids)))
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            on_tokens(len(stream.token_ids()))
    sys.stdout.write("\n")
    return RequestRecord(
        prompt_id=prompt.name,
        kind=prompt.name,
        sent_at=sent_at,
        finished_at=time.monotonic(),
        token_times=tuple(arrivals),
        token_ids=stream.token_ids(),
        usage=stream.summary.usage,
        metrics=stream.summary.metrics,
    )


def _options(prompt: DemoPrompt, max_tokens: int, *, has_speculation: bool) -> GenerateOptions:
    return {**prompt.options, "max_tokens": max_tokens, "speculation": has_speculation}


def _describe_difference(client: Client, prompt: DemoPrompt, fast: RequestRecord, plain: RequestRecord) -> str:
    """Describes where two answers first differ, and how close the two best tokens were; "" if they are identical."""
    index = first_difference(fast.token_ids, plain.token_ids)
    if index is None:
        return ""
    options = _options(prompt, index + 1, has_speculation=False)
    options["top_logprobs"] = 2
    completion = client.complete(prompt.messages, **options).completions[0]
    gap = completion.logprobs[index].gap if index < len(completion.logprobs) else None
    return f"{prompt.name}: answers differ from generated token {index} on; {describe_gap(gap)}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs, or that only one has; None if they are equal."""
    return next((index for index, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def _print_table(pairs: Sequence[tuple[RequestRecord, RequestRecord]]) -> None:
    header = ("prompt", "tokens", "mode", "TTFT", "tokens/s", "mean acc. length", "KV moved", "connector", "identical")
    rows = [header]
    for fast, plain in pairs:
        identical = "yes" if fast.token_ids == plain.token_ids else "no"
        for answer, has_speculation in ((fast, True), (plain, False)):
            length, moved = answer.metrics.speculation.mean_acceptance_length, answer.metrics.kv_transfer
            ttft_seconds = answer.token_times[0][0] - answer.sent_at if answer.token_times else 0.0
            rows.append(
                (
                    answer.prompt_id,
                    f"{answer.usage.num_prompt_tokens}+{len(answer.token_ids)}",
                    _mode(has_speculation=has_speculation),
                    f"{ttft_seconds * 1e3:.0f} ms",
                    f"{stream_rate(answer) or 0.0:.1f}",
                    f"{length:.2f}" if length else "-",
                    f"{moved.bytes / (1 << 20):.2f} MiB",
                    moved.connector or "-",
                    identical,
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    sys.stdout.write("\n")
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    sys.stdout.write("\n")


def _mode(*, has_speculation: bool) -> str:
    return "speculative" if has_speculation else "plain"


def _show(printer: EventPrinter, event: ClusterEvent) -> None:
    if event.kind is not EventKind.LISTENING:
        printer.show(event)
