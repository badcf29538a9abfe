"""`outrider bench`: a load test of a running cluster or of one that it starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.bench.ghz import GhzConfig, load_ghz_config, load_ghz_report
from outrider.bench.load import Level
from outrider.bench.machine import describe_machine, pids_behind
from outrider.bench.prompts import AnswerOptions, load_prompts
from outrider.bench.report import LineProgress, as_json, as_text, beside_ghz
from outrider.bench.run import BenchPlan, BenchResult, run_bench
from outrider.cli.connection import add_connection_arguments, read_tls, read_token
from outrider.cli.progress import EventPrinter
from outrider.cli.three_lines.arguments import add_three_lines_arguments, is_three_lines, run_three_lines
from outrider.cli.up import add_cluster_arguments, make_cluster
from outrider.client import AsyncClient, Client
from outrider.client.options import make_request
from outrider.client.targets import DEFAULT_TARGET
from outrider.errors import InvalidRequestError
from outrider.rpc.credentials import TlsConfig

DEFAULT_PROMPTS = Path(__file__).resolve().parents[1] / "bench" / "prompts.jsonl"
DEFAULT_CONCURRENCY = (1, 4, 8, 16)
COMPARED_SETTINGS = (
    # Both modes get the same prompts, and neither finds them cached.
    "prefill_node.kv_cache.prefix_cache=false",
    "decode_node.kv_cache.prefix_cache=false",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("target")
    where.add_argument("--target", metavar="HOST:PORT", help=f"a running router; default {DEFAULT_TARGET}")
    where.add_argument("--spawn", action="store_true", help="start a cluster for this run instead")
    load = parser.add_argument_group("load")
    load.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL file; default: the built-in prompts")
    load.add_argument("--limit", type=_count, metavar="N", help="only the first N prompts")
    load.add_argument("--concurrency", type=_counts, metavar="N,N", help="closed loop: numbers of clients")
    load.add_argument("--rate", type=_rates, metavar="R,R", help="open loop: requests a second, Poisson arrivals")
    load.add_argument("--rounds", type=_count, default=1, metavar="N", help="passes over all prompts; default 1")
    load.add_argument("--no-speculation", action="store_true", help="without speculation only")
    load.add_argument("--compare", action="store_true", help="with and without speculation, interleaved")
    load.add_argument(
        "--same-prompts",
        action="store_true",
        help="with --compare: the same prompts in both modes, so that answers can be compared; the second mode finds "
        "them cached (--spawn always does this, with prefix caches off)",
    )
    ghz = parser.add_argument_group("load from a ghz config", "instead of --prompts and the flags of answers")
    ghz.add_argument(
        "--ghz", type=Path, metavar="CONFIG", help="send what ghz --config CONFIG sends; calls of Complete are streamed"
    )
    ghz.add_argument(
        "--ghz-report",
        type=Path,
        metavar="FILE",
        help="the output of ghz --format json, to show both runs in one table",
    )
    # No defaults here, so that flags which --ghz ignores can be refused.
    answers = parser.add_argument_group("answers", argument_default=argparse.SUPPRESS)
    answers.add_argument("--max-tokens", type=_count, metavar="N", help="default 128")
    answers.add_argument("--temperature", type=float, metavar="T", help="default 0")
    answers.add_argument("--top-p", type=float, metavar="P")
    answers.add_argument("--top-k", type=int, metavar="K")
    answers.add_argument("--seed", type=int, metavar="S", help="prompt i uses seed S + i; default 0")
    answers.add_argument("--ignore-eos", action="store_true", help="generate --max-tokens tokens in every answer")
    answers.add_argument(
        "--timeout", type=float, metavar="SECONDS", dest="timeout_seconds", help="limit for one answer; default 600"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    add_three_lines_arguments(parser)
    add_connection_arguments(parser)
    add_cluster_arguments(parser)  # for --spawn


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if an answer failed."""
    if is_three_lines(arguments):
        return run_three_lines(arguments, default_prompts=DEFAULT_PROMPTS)
    if arguments.ghz_report and not arguments.ghz:
        raise InvalidRequestError("--ghz-report needs --ghz", field="ghz_report")
    ghz_config = load_ghz_config(arguments.ghz) if arguments.ghz else None
    ghz_report = load_ghz_report(arguments.ghz_report) if arguments.ghz_report else None
    plan = make_plan(arguments, ghz_config)
    options = make_options(arguments, ghz_config)
    check_options(options)
    if arguments.json:
        check_writable(arguments.json)
    connection = _connection(arguments, ghz_config)
    with _router(arguments, ghz_config) as (target, cluster_pids):
        model = describe_model(target, connection)
        result = asyncio.run(_bench(target, connection, plan, options, cluster_pids=cluster_pids))
    machine = describe_machine()
    if arguments.json:
        asked = asdict(options) if ghz_config is None else ghz_config.describe()
        value = as_json(result, machine=machine, options=asked, model=model, command=sys.argv)
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(as_text(result, machine=machine, model=model))
    if ghz_report is not None:
        print(f"\n{beside_ghz(result, ghz_report)}")
    return 1 if any(figures.errors for figures in result.figures) else 0


@dataclass(frozen=True, slots=True)
class Connection:
    tls: TlsConfig | None = None
    token: str | None = field(default=None, repr=False)


def _connection(arguments: argparse.Namespace, ghz_config: GhzConfig | None) -> Connection:
    """Raises: ConfigError; InvalidRequestError where a cluster of our own or a ghz config decides on TLS."""
    tls, token = read_tls(arguments), read_token(arguments)
    if arguments.spawn:
        if tls is not None:
            raise InvalidRequestError("--spawn starts a cluster without TLS: omit the TLS flags", field="tls")
        return Connection()
    if ghz_config is not None:
        if tls is not None:
            raise InvalidRequestError("--ghz takes TLS from its config: omit the TLS flags", field="tls")
        tls = ghz_config.tls
    return Connection(tls, token)


def make_plan(arguments: argparse.Namespace, ghz_config: GhzConfig | None) -> BenchPlan:
    """Raises: InvalidRequestError for flags that do not go together, or prompts that cannot be read."""
    if arguments.compare and arguments.no_speculation:
        raise InvalidRequestError("--compare runs both modes: omit --no-speculation", field="compare")
    if arguments.same_prompts and not arguments.compare:
        raise InvalidRequestError("--same-prompts needs --compare", field="same_prompts")
    if arguments.spawn and arguments.target:
        raise InvalidRequestError("--spawn starts a router: omit --target", field="spawn")
    modes = (False, True) if arguments.compare else (not arguments.no_speculation,)
    if ghz_config is not None:
        return _make_ghz_plan(arguments, ghz_config, modes)
    concurrencies = arguments.concurrency or (() if arguments.rate else DEFAULT_CONCURRENCY)
    levels = [Level(is_open_loop=False, value=count) for count in concurrencies]
    levels += [Level(is_open_loop=True, value=rate) for rate in arguments.rate or ()]
    try:
        prompts = load_prompts(arguments.prompts or DEFAULT_PROMPTS)
    except OSError as error:
        raise InvalidRequestError(f"--prompts: {error}", field="prompts") from error
    return BenchPlan(
        prompts=prompts[: arguments.limit],
        levels=tuple(levels),
        modes=modes,
        rounds=arguments.rounds,
        same_prompts=arguments.same_prompts or (arguments.spawn and arguments.compare),
        run_mark="" if arguments.spawn else f"{secrets.token_hex(3)} ",
    )


def _make_ghz_plan(arguments: argparse.Namespace, ghz_config: GhzConfig, modes: tuple[bool, ...]) -> BenchPlan:
    """As ghz would run it, which warms nothing up. Raises: InvalidRequestError for a flag that has no say in it."""
    options = [field.name for field in fields(AnswerOptions) if hasattr(arguments, field.name)]
    others = [name for name in ("prompts", "rate", "same_prompts") if getattr(arguments, name)]
    if options or others:
        name = [*others, *options][0].replace("_seconds", "")
        raise InvalidRequestError(
            f"--ghz takes requests and load from the config: omit --{name.replace('_', '-')}", field=name
        )
    concurrencies = arguments.concurrency or (ghz_config.concurrency,)
    return BenchPlan(
        prompts=ghz_config.requests()[: arguments.limit],
        levels=tuple(Level(is_open_loop=False, value=count) for count in concurrencies),
        modes=modes,
        rounds=arguments.rounds,
        has_warm_up=False,
    )


def make_options(arguments: argparse.Namespace, ghz_config: GhzConfig | None) -> AnswerOptions:
    if ghz_config is not None:
        return AnswerOptions(timeout_seconds=ghz_config.timeout_seconds)
    given = {field.name: getattr(arguments, field.name) for field in fields(AnswerOptions) if field.name in arguments}
    return AnswerOptions(**given)


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
def _router(arguments: argparse.Namespace, ghz_config: GhzConfig | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A router's address and the process ids of its cluster, as far as they are known."""
    if not arguments.spawn:
        target = arguments.target or (ghz_config.host if ghz_config else "") or DEFAULT_TARGET
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


def describe_model(target: str, connection: Connection) -> dict[str, Any]:
    """Raises: PeerLostError when the router cannot be reached."""
    with Client(target, tls=connection.tls, token=connection.token) as client:
        model = client.model()
    return {
        "model": model.name,
        "dtype": model.dtype,
        "proposer": model.proposer or "none",
        "num_speculative_tokens": model.num_speculative_tokens,
        "version": model.version,
        "fingerprint": model.fingerprint[:12],
    }


async def _bench(
    target: str, connection: Connection, plan: BenchPlan, options: AnswerOptions, *, cluster_pids: tuple[int, ...]
) -> BenchResult:
    async with AsyncClient(target, tls=connection.tls, token=connection.token) as client:
        return await run_bench(client, plan, options, cluster_pids=cluster_pids, progress=LineProgress(sys.stderr))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be above 0")
    return rates
