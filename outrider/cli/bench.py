"""`outrider bench load` and `outrider bench compare`: load tests of a running cluster, or of a new one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from outrider.bench.load import Level
from outrider.bench.machine import describe_machine, pids_behind
from outrider.bench.measure import BenchResult
from outrider.bench.prompts import DEFAULT_PROMPTS, AnswerOptions, load_prompts
from outrider.bench.report import LineProgress, as_json, as_text
from outrider.bench.run import BenchPlan, run_bench
from outrider.cli.cluster_arguments import WITHOUT_PREFIX_CACHE, add_cluster_arguments
from outrider.cli.connection import (
    add_connection_arguments,
    add_target_argument,
    check_writable,
    read_connection,
    targets,
)
from outrider.cli.sampling_arguments import seconds
from outrider.client import AsyncClient, Client
from outrider.client.options import make_request
from outrider.errors import InvalidRequestError

DEFAULT_CONCURRENCY = (1, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", dest="kind", required=True)
    load = kinds.add_parser("load", help="measure answers per second, latencies and acceptance of a running cluster")
    load.add_argument("--no-speculation", action="store_true", help="disable speculation")
    add_target_argument(load)
    compare = kinds.add_parser(
        "compare",
        help="compare speculation with plain decoding, interleaved, on the same prompts: in a cluster that it starts, "
        "or in one that is running",
    )
    where = compare.add_argument_group("cluster", "without --target a cluster is started, with these flags")
    where.add_argument("--target", type=targets, metavar="HOST:PORT", help="use the running router at this address")
    where.add_argument(
        "--same-prompts",
        action="store_true",
        help="with --target: the same prompts in both modes, so that answers can be compared; the second mode finds "
        "them cached",
    )
    add_cluster_arguments(compare, port=0)
    for command in (load, compare):
        _add_load_arguments(command)
        add_connection_arguments(command)


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--prompts",
        type=Path,
        default=DEFAULT_PROMPTS,
        metavar="FILE",
        help="JSONL file; default: the built-in prompts",
    )
    load.add_argument("--limit", type=_count, metavar="N", help="use only the first N prompts")
    load.add_argument("--concurrency", type=_counts, metavar="N,N", help="closed loop: numbers of clients")
    load.add_argument(
        "--rate", type=_rates, default=(), metavar="R,R", help="open loop: requests per second, with Poisson arrivals"
    )
    load.add_argument(
        "--rounds", type=_count, default=1, metavar="N", help="number of passes over all prompts; default 1"
    )
    load.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    answers = parser.add_argument_group("answers", argument_default=argparse.SUPPRESS)
    answers.add_argument("--max-tokens", type=_count, metavar="N", help="default 128")
    answers.add_argument("--temperature", type=float, metavar="T", help="default 0")
    answers.add_argument("--top-p", type=float, metavar="P")
    answers.add_argument("--top-k", type=int, metavar="K")
    answers.add_argument("--seed", type=int, metavar="S", help="prompt i uses seed S + i; default 0")
    answers.add_argument("--ignore-eos", action="store_true", help="generate --max-tokens tokens in every answer")
    answers.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        dest="timeout_seconds",
        help="time limit of one answer; default 600",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if an answer failed."""
    plan = make_plan(arguments)
    given = {field.name: getattr(arguments, field.name) for field in fields(AnswerOptions) if field.name in arguments}
    options = AnswerOptions(**given)
    make_request("", {"top_k": options.top_k, "seed": options.seed, "max_tokens": options.max_tokens})  # validates them
    if arguments.json:
        check_writable(arguments.json, "json")
    connection = read_connection(arguments)
    if connection["tls"] is not None and arguments.target is None:
        raise InvalidRequestError("the cluster that is started has no TLS: omit the TLS flags", field="tls")
    with _router(arguments) as (target, cluster_pids):
        with Client(target, **connection) as client:
            model = describe_model(client)

        async def measure() -> BenchResult:
            async with AsyncClient(target, **connection) as client:
                progress = LineProgress(sys.stderr)
                return await run_bench(client, plan, options, cluster_pids=cluster_pids, progress=progress)

        result = asyncio.run(measure())
    machine = describe_machine()
    if arguments.json:
        value = as_json(result, machine=machine, options=asdict(options), model=model, command=sys.argv)
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(as_text(result, machine=machine, model=model))
    return 1 if any(figures.errors for figures in result.figures) else 0


def make_plan(arguments: argparse.Namespace) -> BenchPlan:
    """Makes the plan. Raises: InvalidRequestError if the prompts cannot be read."""
    compares = arguments.kind == "compare"
    starts_cluster = arguments.target is None
    concurrencies = arguments.concurrency or (() if arguments.rate else DEFAULT_CONCURRENCY)
    levels = [Level(is_open_loop=False, value=count) for count in concurrencies]
    levels += [Level(is_open_loop=True, value=rate) for rate in arguments.rate]
    try:
        prompts = load_prompts(arguments.prompts)
    except OSError as error:
        raise InvalidRequestError(f"--prompts: {error}", field="prompts") from error
    return BenchPlan(
        prompts=prompts[: arguments.limit],
        levels=tuple(levels),
        modes=(False, True) if compares else (not arguments.no_speculation,),
        rounds=arguments.rounds,
        same_prompts=compares and (arguments.same_prompts or starts_cluster),
        run_mark="" if starts_cluster else f"{secrets.token_hex(3)} ",
    )


@contextlib.contextmanager
def _router(arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields a router's address and the process ids of its cluster, if known."""
    if arguments.target is not None:
        yield arguments.target, pids_behind(arguments.target)
        return
    from outrider.cli.up import make_cluster
    from outrider.cluster.event_printer import EventPrinter

    arguments.overrides = [WITHOUT_PREFIX_CACHE, *arguments.overrides]
    cluster = make_cluster(arguments)
    cluster.on_event = EventPrinter(sys.stderr).show
    with cluster:
        yield cluster.router_address, tuple(node.pid for node in cluster.nodes)


def describe_model(client: Client) -> dict[str, Any]:
    """Returns the model's fields for the report. Raises: PeerLostError if the router cannot be reached."""
    model = client.model()
    return {
        "model": model.name,
        "dtype": model.dtype,
        "proposer": model.proposer or "none",
        "num_speculative_tokens": model.num_speculative_tokens,
        "version": model.version,
        "fingerprint": model.fingerprint[:12],
    }


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        rates = tuple(float(part) for part in text.split(","))
        if all(0 < rate < float("inf") for rate in rates):
            return rates
    raise argparse.ArgumentTypeError(f"{text}: rates are numbers above 0, with commas between them")
