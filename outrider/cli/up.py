"""`outrider up`: a local cluster until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from outrider import __version__
from outrider.cli.config import sections_of
from outrider.cli.progress import EventPrinter
from outrider.cluster import ChildState, Cluster, ClusterConfig, ClusterEvent, Launch
from outrider.config import CONFIG_FILE_VARIABLE, load_config
from outrider.errors import PeerLostError
from outrider.service.server import probe_port

SHOWN_FIRST = ("model", "fingerprint", "dtype", "device", "attention_backend", "threads", "cpus", "cpu_turns")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument(
        "--json-status", metavar="FILE", type=Path, help="write addresses and pids to this file and keep it current"
    )

    parser.add_argument(
        "--tls",
        metavar="DIR",
        type=Path,
        help="mutual TLS on every connection; unless DIR has them, makes there ca.pem, client.pem and client-key.pem, "
        "which clients need, and node.pem and node-key.pem, valid for 30 days",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="ask clients for tokens; a line is NAME sha256:HEX [priority=N] [rate=N], HEX the SHA-256 of a token",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that starts a cluster. They set settings and override file and environment."""
    parser.add_argument("--model", metavar="ID", help="a directory, a hub id, or the default model")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto: the checkpoint's dtype, but float32 on a CPU without native kernels",
    )
    parser.add_argument("--draft", metavar="PROPOSER", help="ngram (default), draft_model:PATH, or none")
    for role in ("prefill", "decode", "draft"):
        parser.add_argument(f"--{role}-nodes", type=int, metavar="N", help=f"number of {role} nodes; default 1")
    parser.add_argument("--routers", type=int, metavar="N", help="number of routers, on consecutive ports; default 1")
    parser.add_argument(
        "--store", metavar="URL", help="what routers share: valkey://host:port; default: memory, each its own"
    )
    parser.add_argument("--port", type=int, metavar="N", help="the router's port; default 50051; 0: the system chooses")
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML file; default: ${CONFIG_FILE_VARIABLE}")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="one setting; repeatable"
    )
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="keep each process's log in this directory")


def make_cluster(arguments: argparse.Namespace, *, tls: Path | None = None, token_file: Path | None = None) -> Cluster:
    """`tls`: the folder of `--tls`. Raises: ConfigError, also for a setting that only a child would read."""
    default = os.environ.get(CONFIG_FILE_VARIABLE)
    file = arguments.config or (Path(default) if default else None)
    flags = {
        "model.id": arguments.model,
        "model.dtype": arguments.dtype,
        "cluster.draft": arguments.draft,
        "cluster.prefill_nodes": arguments.prefill_nodes,
        "cluster.decode_nodes": arguments.decode_nodes,
        "cluster.draft_nodes": arguments.draft_nodes,
        "cluster.routers": arguments.routers,
        "cluster.port": arguments.port,
        "router.store": arguments.store,
        "router.token_file": token_file and token_file.absolute(),
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None] + arguments.overrides
    sections = load_config(sections_of(None), file=file, environ=os.environ, overrides=overrides)
    if tls is not None:
        from outrider.cluster.authority import prepare_tls_folder

        shown = prepare_tls_folder(tls, sections["security"])
        files = {"certificate": shown.certificate, "private_key": shown.private_key, "authority": shown.authority}
        overrides = [*(f"security.tls.{name}={path}" for name, path in files.items()), *overrides]
    config: ClusterConfig = sections["cluster"]
    if config.routers > 1 and config.port is None:
        config = replace(config, port=sections["router"].server.port)
    launch = Launch(config_file=file, overrides=tuple(overrides), log_directory=arguments.log_dir)
    return Cluster(config, launch)


def run(arguments: argparse.Namespace) -> int:
    printer = EventPrinter(sys.stdout)
    cluster = make_cluster(arguments, tls=arguments.tls, token_file=arguments.token_file)
    _check_router_ports(cluster)
    # A SimpleQueue, because its put may interrupt its own get: signal handlers run in this thread.
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
    cluster.start()
    has_served = False
    try:
        while not signals and cluster.failure is None:
            news.get()
            is_first = not has_served and all(node.state is ChildState.SERVING for node in cluster.nodes)
            has_served = has_served or is_first
            if has_served and arguments.json_status is not None:
                cluster.write_status(arguments.json_status)
            if is_first:
                announce_serving(cluster, printer)
                if arguments.tls is not None:
                    printer.say(client_flags(arguments.tls))
    finally:
        statuses = cluster.stop()
        if arguments.json_status is not None:
            arguments.json_status.unlink(missing_ok=True)
    if cluster.failure is not None:
        raise PeerLostError(f"{cluster.failure} (logs in {cluster.log_directory})", reason="START_FAILED")
    # Before it serves, a process may still be importing modules: SIGTERM then ends it without a message.
    good = {0} if has_served else {0, -signal.SIGTERM}
    return 0 if set(statuses.values()) <= good else 1


def _check_router_ports(cluster: Cluster) -> None:
    """Reports a port in use at once, not after the weights are loaded. Raises: ConfigError."""
    launch, port = cluster.launch, cluster.config.port
    overrides = [*launch.overrides, *([] if port is None else [f"router.server.port={port}"])]
    router = load_config(sections_of("router"), file=launch.config_file, environ=launch.environ, overrides=overrides)[
        "router"
    ]
    if router.server.port:
        for index in range(cluster.config.routers):
            probe_port(router.server.host, router.server.port + index, "choose another with --port")


def client_flags(tls: Path) -> str:
    """What other commands need."""
    return f"clients: --authority {tls}/ca.pem --certificate {tls}/client.pem --private-key {tls}/client-key.pem"


def announce_serving(cluster: Cluster, printer: EventPrinter) -> None:
    """Prints the address and what the decode node reported: numerics, kernels, and other facts."""
    described = next((dict(node.description) for node in cluster.nodes if node.role == "decode_node"), {})
    facts = {name: described[name] for name in SHOWN_FIRST if name in described}
    printer.say(f"serving on {cluster.router_address}")
    if "numerics" in described:
        printer.say(f"numerics: {described['numerics']}")
        printer.say(described["kernels"])
    printer.say(" ".join([f"version={__version__}", *(f"{name}={value}" for name, value in facts.items())]))
