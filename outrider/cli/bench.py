"""`outrider bench`: load on a running cluster, or on one of its own, and what came of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.bench.load import AnswerOptions, Level
from outrider.bench.machine import describe_machine, pids_behind
from outrider.bench.prompts import load_prompts
from outrider.bench.report import LineProgress, as_json, as_text
from outrider.bench.run import BenchPlan, BenchResult, run_bench
from outrider.cli.progress import EventPrinter
from outrider.cli.up import add_cluster_arguments, make_cluster
from outrider.client import AsyncClient, Client
from outrider.client.options import make_request
from outrider.client.sync import DEFAULT_TARGET
from outrider.errors import InvalidRequestError

DEFAULT_PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts.jsonl"
DEFAULT_CONCURRENCY = (1, 4, 8, 16)
COMPARED_SETTINGS = (
    # Both modes get the same prompts, and neither finds them cached.
    "prefill_node.kv_cache.prefix_cache=false",
    "decode_node.kv_cache.prefix_cache=false",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument("--target", metavar="HOST:PORT", help=f"a running router; default {DEFAULT_TARGET}")
    where.add_argument("--spawn", action="store_true", help="start a cluster for this run instead")
    load = parser.add_argument_group("load")
    load.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, metavar="FILE", help="JSONL; default: our own")
    load.add_argument("--limit", type=_count, metavar="N", help="only the first N prompts")
    load.add_argument("--concurrency", type=_counts, metavar="N,N", help="closed loop: so many clients at a time")
    load.add_argument("--rate", type=_rates, metavar="R,R", help="open loop: so many requests a second, Poisson")
    load.add_argument("--rounds", type=_count, default=1, metavar="N", help="times over all prompts; default 1")
    load.add_argument("--no-speculation", action="store_true", help="plain decoding only")
    load.add_argument("--compare", action="store_true", help="with and without speculation, interleaved")
    load.add_argument(
        "--same-prompts",
        action="store_true",
        help="with --compare: the same prompts both ways, so that answers are compared; the second way finds them "
        "cached (--spawn turns prefix caches off and does this anyway)",
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="default 128")
    answers.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    answers.add_argument("--top-p", type=float, default=1.0, metavar="P")
    answers.add_argument("--top-k", type=int, default=0, metavar="K")
    answers.add_argument("--seed", type=int, default=0, metavar="S", help="prompt i is drawn with S + i; default 0")
    answers.add_argument("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    answers.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one answer; default 600")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    add_cluster_arguments(parser)  # for --spawn


def run(arguments: argparse.Namespace) -> int:
    """1 when an answer failed."""
    plan = make_plan(arguments)
    options = AnswerOptions(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
        timeout_seconds=arguments.timeout,
    )
    check_options(options)
    if arguments.json:
        check_writable(arguments.json)
    with _router(arguments) as (target, cluster_pids):
        model = describe_model(target)
        result = asyncio.run(_bench(target, plan, options, cluster_pids=cluster_pids))
    machine = describe_machine()
    if arguments.json:
        value = as_json(result, machine=machine, options=options, model=model, command=sys.argv)
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(as_text(result, machine=machine, model=model))
    return 1 if any(figures.errors for figures in result.figures) else 0


def make_plan(arguments: argparse.Namespace) -> BenchPlan:
    """Raises: InvalidRequestError for flags that do not go together, or prompts that cannot be read."""
    if arguments.compare and arguments.no_speculation:
        raise InvalidRequestError("--compare runs both ways: leave --no-speculation out", field="compare")
    if arguments.same_prompts and not arguments.compare:
        raise InvalidRequestError("--same-prompts goes with --compare", field="same_prompts")
    if arguments.spawn and arguments.target:
        raise InvalidRequestError("--spawn starts a router of its own: leave --target out", field="spawn")
    concurrencies = arguments.concurrency or (() if arguments.rate else DEFAULT_CONCURRENCY)
    levels = [Level(is_open_loop=False, value=count) for count in concurrencies]
    levels += [Level(is_open_loop=True, value=rate) for rate in arguments.rate or ()]
    try:
        prompts = load_prompts(arguments.prompts)
    except OSError as error:
        raise InvalidRequestError(f"--prompts: {error}", field="prompts") from error
    return BenchPlan(
        prompts=prompts[: arguments.limit],
        levels=tuple(levels),
        modes=(False, True) if arguments.compare else (not arguments.no_speculation,),
        rounds=arguments.rounds,
        same_prompts=arguments.same_prompts or (arguments.spawn and arguments.compare),
        run_mark="" if arguments.spawn else f"{secrets.token_hex(3)} ",
    )


def check_options(options: AnswerOptions) -> None:
    """Raises: InvalidRequestError for what no request can carry."""
    make_request("", {"top_k": options.top_k, "seed": options.seed, "max_tokens": options.max_tokens})


def check_writable(path: Path) -> None:
    """Before the work of an hour is lost. Raises: InvalidRequestError."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise InvalidRequestError(f"--json {path}: {error.strerror}", field="json") from error


@contextmanager
def _router(arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A router's address and the process ids of its cluster, as far as they are known."""
    if not arguments.spawn:
        target = arguments.target or DEFAULT_TARGET
        yield target, pids_behind(target)
        return
    if arguments.port is None:
        arguments.port = 0
    if arguments.compare:
        arguments.overrides = [*COMPARED_SETTINGS, *arguments.overrides]
    cluster = make_cluster(arguments)
    cluster.on_event = EventPrinter(sys.stderr).show
    with cluster:
        yield cluster.router_address, tuple(node.pid for node in cluster.nodes)


def describe_model(target: str) -> dict[str, Any]:
    """Raises: PeerLostError when the router cannot be reached."""
    with Client(target) as client:
        model = client.model()
    return {
        "model": model.name,
        "dtype": model.dtype,
        "proposer": model.proposer or "none",
        "num_speculative_tokens": model.num_speculative_tokens,
        "version": model.version,
        "fingerprint": model.fingerprint[:12],
    }


async def _bench(target: str, plan: BenchPlan, options: AnswerOptions, *, cluster_pids: tuple[int, ...]) -> BenchResult:
    async with AsyncClient(target) as client:
        return await run_bench(client, plan, options, cluster_pids=cluster_pids, progress=LineProgress(sys.stderr))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates are above 0")
    return rates
