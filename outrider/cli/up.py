"""`outrider up`: runs a local cluster until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from outrider import __version__
from outrider.cli.cluster_arguments import HEAD, SECTIONS, add_cluster_arguments
from outrider.cli.config import sections_of
from outrider.cluster.child import ChildState, ClusterEvent
from outrider.cluster.cluster import SIGNAL_SECONDS, Cluster
from outrider.cluster.config import DECODE, DRAFT, ClusterConfig
from outrider.cluster.event_printer import EventPrinter
from outrider.cluster.gateway import require_engine_protocol, require_gateway
from outrider.cluster.gpus import VISIBLE, assign_gpus
from outrider.cluster.plan import ROUTER, Launch
from outrider.cluster.shares import has_shared_cpus
from outrider.config.arguments import (
    add_setting_flags,
    given_settings,
    load_arguments,
    write_warnings,
)
from outrider.config.imports import add_vllm_flags
from outrider.config.resolve import ResolvedConfig, parse_reference
from outrider.errors import ConfigError, PeerLostError
from outrider.heads.locate import AUTO_HEAD
from outrider.lossy_stream import drain_standard_streams, guard_standard_streams
from outrider.model_hub.locate import is_available_locally
from outrider.service.address import loopback
from outrider.service.server import probe_port
from outrider.speculation.proposers.factory import NO_PROPOSER, DraftChoice

SHOWN_FIRST = (
    *("model", "fingerprint", "dtype", "max_model_len"),
    *("device", "attention_backend", "threads", "cpus", "cpu_turns"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument(
        "--json-status", metavar="FILE", type=Path, help="write addresses and pids to this file and keep it current"
    )
    parser.add_argument(
        "--tls",
        metavar="DIR",
        type=Path,
        help="use mutual TLS on every connection; if DIR lacks them, create ca.pem, client.pem and client-key.pem, "
        "which clients need, and node.pem and node-key.pem there, valid for 30 days",
    )
    parser.add_argument(
        "--token-hashes",
        dest="router.token_file",
        metavar="FILE",
        type=lambda text: Path(text).absolute(),  # null or an empty path would disable authentication
        help="require tokens of clients; a line of the file is NAME sha256:HEX [priority=N] [rate=N] [adapters], where "
        "HEX is the SHA-256 of a token",
    )
    add_setting_flags(parser, {"openai": "cluster.openai_port"}, SECTIONS)
    add_vllm_flags(parser)


def make_cluster(arguments: argparse.Namespace, *, tls: Path | None = None) -> Cluster:
    """Makes the cluster; `tls` is the folder of `--tls`. Writes warnings to stderr.

    Raises: ConfigError, also for settings that only a child would read.
    """

    def load(role: str | None) -> ResolvedConfig:
        return load_arguments(arguments, {**sections_of(role), "cluster": ClusterConfig}, role=role)

    common = load(None)
    by_role = {role: load(role) for role, _ in map(parse_reference, arguments.imports) if role}
    write_warnings("outrider", [text for each in (common, *by_role.values()) for text in each.warnings])
    sections = common.sections
    drafting = by_role.get(DECODE, common)  # the decode nodes' file chooses the drafter for all nodes
    heads = [text for text in drafting.overrides if text.startswith(f"{HEAD}=")]
    overrides = [*common.overrides, *heads, *given_settings(arguments)]
    if tls is not None:
        from outrider.cluster.authority import prepare_tls_folder

        shown = prepare_tls_folder(tls, sections["security"])
        files = {"certificate": shown.certificate, "private_key": shown.private_key, "authority": shown.authority}
        overrides = [*(f"security.tls.{name}={path}" for name, path in files.items()), *overrides]
    config: ClusterConfig = drafting.sections["cluster"]
    _check_heads(getattr(arguments, HEAD), config.draft_choice)
    if config.port:  # a port in use is reported at once, not only after loading
        for index in range(config.routers):
            probe_port(sections["server"].host, config.port + index, "choose another with --port")
    if config.openai_port is not None:
        _check_gateway(config.openai_port, sections, has_tls=tls is not None)
    node_environ, node_overrides = assign_gpus(config, common, by_role)
    launch = Launch(
        config_file=arguments.config,
        overrides=tuple(overrides),
        node_overrides=node_overrides,
        node_environ=node_environ,
        role_overrides={
            role: tuple(text for text in settings.overrides if text not in common.overrides)
            for role, settings in by_role.items()
        },
        log_directory=arguments.log_dir,
        locate_model=not is_available_locally(sections["model"]),
    )
    return Cluster(config, launch)


def _check_heads(head: Path | None, draft: DraftChoice) -> None:
    """Checks the choice of a head before any node starts. Raises: ConfigError."""
    if head and draft.proposer in (NO_PROPOSER, "head"):
        raise ConfigError(f"--head makes decode nodes draft, and --draft {draft.proposer} prevents that: choose one")
    folder = str(head or (draft.model_id if draft.proposer == "head" else AUTO_HEAD))
    if folder != AUTO_HEAD and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"{folder} is not a folder, so it cannot contain a head")


def _check_gateway(port: int, sections: Mapping[str, Any], *, has_tls: bool) -> None:
    """Checks the settings of the OpenAI gateway. Raises: ConfigError if it could never reach a router."""
    require_gateway()
    require_engine_protocol()
    router = sections["router"]
    if has_tls or sections["security"].tls.is_enabled or router.tls.is_enabled:
        raise ConfigError("--openai: the gateway reaches routers in plaintext only; start it without TLS")
    if router.token_file is not None:
        raise ConfigError(
            "--openai: the gateway shows routers no token, so router.token_file would refuse it; let a proxy before "
            "the gateway ask for credentials instead"
        )
    if port:
        probe_port(loopback(), port, "choose another with --openai")


def run(arguments: argparse.Namespace) -> int:
    guard_standard_streams()
    printer = EventPrinter(sys.stdout)
    cluster = make_cluster(arguments, tls=arguments.tls)
    # A SimpleQueue is reentrant: a signal handler's put may interrupt a get in this thread.
    news: queue.SimpleQueue[None] = queue.SimpleQueue()
    signals: list[int] = []

    def show(event: ClusterEvent) -> None:
        news.put(None)
        printer.show(event)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if signals:
            cluster.kill_all()
        signals.append(number)
        news.put(None)

    cluster.on_event = show
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    printer.say(f"outrider {__version__}; logs in {cluster.log_directory}")
    if cluster.config.draft_nodes and cluster.config.draft_choice.model_id and has_shared_cpus(cluster.config):
        printer.say("the draft model computes on the target's processors, which is slower than --draft none or ngram")
    for name, environ in cluster.launch.node_environ.items():
        memory = [text.partition("=")[2] for text in cluster.launch.node_overrides[name] if "kv_cache.memory" in text]
        printer.say(f"{name:<10} on GPU {environ[VISIBLE]}{''.join(f', {share} of its memory' for share in memory)}")
    cluster.start()
    has_served = False
    try:
        while not signals and cluster.failure is None:
            with contextlib.suppress(queue.Empty):
                news.get(timeout=SIGNAL_SECONDS)
            is_first = not has_served and all(node.state is ChildState.SERVING for node in cluster.nodes)
            has_served = has_served or is_first
            if has_served and arguments.json_status is not None:
                try:
                    cluster.write_status(arguments.json_status)
                except OSError as error:  # the cluster serves anyway
                    printer.say(f"{arguments.json_status} cannot be written: {error.strerror}")
            if is_first:
                announce_serving(cluster, printer)
                if cluster.config.openai_port is not None:
                    announce_openai(cluster, printer)
                tls = "" if arguments.tls is None else f" --tls {arguments.tls}"
                printer.say(f"now, for example: outrider chat --target {cluster.router_address}{tls}")
    finally:
        cluster.stop()
        if arguments.json_status is not None:
            with contextlib.suppress(OSError):
                arguments.json_status.unlink()
        drain_standard_streams()
    if cluster.failure is not None:
        raise PeerLostError(f"{cluster.failure} (logs in {cluster.log_directory})", reason="START_FAILED")
    if len(signals) > 1:
        return 128 + signals[-1]
    return 0 if cluster.has_ended_well else 1


def announce_serving(cluster: Cluster, printer: EventPrinter) -> None:
    """Prints the address, the drafters, and what the decode node reported: numerics, kernels, and other facts."""
    described = next((dict(node.description) for node in cluster.nodes if node.role == "decode_node"), {})
    drafting = {node.name: node.description.get("proposer") for node in cluster.nodes if node.role in (DRAFT, DECODE)}
    drafts = [f"{name} by {proposer}" for name, proposer in drafting.items() if proposer not in (None, NO_PROPOSER)]
    facts = {name: described[name] for name in SHOWN_FIRST if name in described}
    printer.say(f"serving on {cluster.router_address}")
    page = next((node.metrics_address for node in cluster.nodes if node.role == ROUTER), None)
    if page is not None:
        printer.say(f"page: http://{page}/")
    printer.say(f"drafts: {', '.join(drafts) or 'none'}")
    if "numerics" in described:
        printer.say(f"numerics: {described['numerics']}")
        printer.say(described["kernels"])
    printer.say(" ".join([f"version={__version__}", *(f"{name}={value}" for name, value in facts.items())]))


def announce_openai(cluster: Cluster, printer: EventPrinter) -> None:
    """Prints the URL for OpenAI's clients, and a request to copy."""
    model = cluster.node("openai").description["model"]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    printer.say(f"OpenAI API on {cluster.openai_url}, model {model}; for example:")
    printer.say(f"  curl {cluster.openai_url}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
