"""`outrider up`: a local cluster until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from outrider import __version__
from outrider.cli.config import sections_of
from outrider.cluster import ChildState, Cluster, ClusterConfig, ClusterEvent, Launch
from outrider.cluster.cpu_shares import has_shared_cpus
from outrider.cluster.event_printer import EventPrinter
from outrider.cluster.gateway_command import require_gateway
from outrider.cluster.gpu_shares import shares_of_gpu, shares_of_memory
from outrider.cluster.plan import LOOPBACK
from outrider.config import ResolvedConfig, add_settings_arguments, load_config, write_warnings
from outrider.config.imports import add_vllm_flags, parse_reference, read_vllm_flags
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError, PeerLostError
from outrider.heads.locate import AUTO_HEAD
from outrider.service.server import probe_port
from outrider.speculation.proposers.factory import DRAFT_CHOICES, NO_PROPOSER, DraftChoice

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
        help="mutual TLS on every connection; unless DIR has them, creates ca.pem, client.pem and client-key.pem, "
        "which clients need, and node.pem and node-key.pem there, valid for 30 days",
    )
    parser.add_argument(
        "--token-hashes",
        metavar="FILE",
        type=Path,
        help="ask clients for tokens; a line is NAME sha256:HEX [priority=N] [rate=N], HEX the SHA-256 of a token",
    )
    parser.add_argument(
        "--openai",
        metavar="PORT",
        type=int,
        help="OpenAI's API over HTTP on this port of 127.0.0.1, by the SMG gateway (pip install 'outrider[openai]'); "
        "0: the system chooses",
    )
    add_vllm_flags(parser)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that starts a cluster. They set settings and override file and environment."""
    parser.add_argument("--model", metavar="ID", help="a directory, a hub id, or the default model")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto: the checkpoint's dtype, but float32 on a CPU without native kernels",
    )
    parser.add_argument(
        "--head", metavar="DIR", type=Path, help="decode nodes draft with this drafter head, where it pays"
    )
    parser.add_argument("--draft", metavar="PROPOSER", help=f"{', '.join(DRAFT_CHOICES)}; default ngram")
    for role in ("prefill", "decode", "draft"):
        parser.add_argument(f"--{role}-nodes", type=int, metavar="N", help=f"number of {role} nodes; default 1")
    parser.add_argument("--routers", type=int, metavar="N", help="number of routers, on consecutive ports; default 1")
    parser.add_argument(
        "--store", metavar="URL", help="what routers share: valkey://host:port; default: memory, each its own"
    )
    parser.add_argument("--port", type=int, metavar="N", help="the router's port; default 50051; 0: the system chooses")
    add_settings_arguments(parser, os.environ)
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="keep each process's log in this directory")


def make_cluster(
    arguments: argparse.Namespace,
    *,
    tls: Path | None = None,
    token_hashes: Path | None = None,
    openai_port: int | None = None,
    vllm_flags: Sequence[str] = (),
) -> Cluster:
    """`tls`: the folder of `--tls`; `vllm_flags`: our settings. Writes warnings to stderr.

    Raises: ConfigError, also for a setting that only a child would read.
    """
    flags = {
        "model.id": arguments.model,
        "model.dtype": arguments.dtype,
        "model.head": arguments.head and arguments.head.expanduser().absolute(),
        "cluster.draft": arguments.draft,
        "cluster.prefill_nodes": arguments.prefill_nodes,
        "cluster.decode_nodes": arguments.decode_nodes,
        "cluster.draft_nodes": arguments.draft_nodes,
        "cluster.routers": arguments.routers,
        "cluster.port": arguments.port,
        "cluster.openai_port": openai_port,
        "router.store": arguments.store,
        "router.token_file": token_hashes and token_hashes.absolute(),
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    overrides = [*vllm_flags, *given, *arguments.overrides]
    roles = dict.fromkeys((None, *(parse_reference(text)[0] for text in arguments.imports)))
    by_role = {
        role: load_config(
            sections_of(role) | {"cluster": ClusterConfig},
            file=arguments.config,
            environ=os.environ,
            overrides=overrides,
            imports=arguments.imports,
            role=role,
        )
        for role in roles
    }
    write_warnings("outrider", [warning for settings in by_role.values() for warning in settings.warnings])
    sections = by_role[None].sections
    if tls is not None:
        from outrider.cluster.authority import prepare_tls_folder

        shown = prepare_tls_folder(tls, sections["security"])
        files = {"certificate": shown.certificate, "private_key": shown.private_key, "authority": shown.authority}
        overrides = [*(f"security.tls.{name}={path}" for name, path in files.items()), *overrides]
    config: ClusterConfig = by_role.get("decode_node", by_role[None]).sections["cluster"]
    _check_heads(arguments.head, config.draft_choice)
    if config.port:  # reported at once, not after the weights are loaded
        for index in range(config.routers):
            probe_port(sections["server"].host, config.port + index, "choose another with --port")
    if config.openai_port is not None:
        _check_gateway(config.openai_port, sections, has_tls=tls is not None)
    named, overridden = ({text.partition("=")[0] for text in each} for each in (vllm_flags, arguments.overrides))
    is_share = "kv_cache.memory" in (named - overridden) | by_role[None].imported.keys()
    launch = Launch(
        config_file=arguments.config,
        imports=tuple(arguments.imports),
        overrides=tuple(overrides),
        node_overrides=_shares_of_memory(config, by_role, is_share=is_share),
        log_directory=arguments.log_dir,
    )
    return Cluster(config, launch)


def _shares_of_memory(
    config: ClusterConfig, by_role: Mapping[str | None, ResolvedConfig], *, is_share: bool
) -> dict[str, tuple[str, ...]]:
    """KV memory by node. `is_share`: it was asked for as a share of one server, which all nodes are together."""
    sections, imported = by_role[None].sections, by_role[None].imported.get("kv_cache.memory")
    memory: KVCacheConfig = sections["kv_cache"]
    if is_share:
        shares = shares_of_memory(config, 100 * (memory.memory_fraction or 0.0))
    else:
        shares = {} if memory.memory else shares_of_gpu(config, sections["model"].device)
    own = {role for role, settings in by_role.items() if settings.imported.get("kv_cache.memory") != imported}
    return {name: share for name, share in shares.items() if f"{name.partition('-')[0]}_node" not in own}


def _check_heads(head: Path | None, draft: DraftChoice) -> None:
    """What is wrong is said at once, not by each node. Raises: ConfigError."""
    if head and draft.proposer in (NO_PROPOSER, "head"):
        raise ConfigError(f"--head drafts in decode nodes, --draft {draft.proposer} keeps them from it: choose one")
    folder = str(head or (draft.model_id if draft.proposer == "head" else AUTO_HEAD))
    if folder != AUTO_HEAD and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"{folder} is no folder, so no head is there")


def _check_gateway(port: int, sections: Mapping[str, Any], *, has_tls: bool) -> None:
    """Raises: ConfigError where the OpenAI gateway would never reach a router."""
    require_gateway()
    router = sections["router"]
    if has_tls or sections["security"].tls.is_enabled or router.tls.is_enabled:
        raise ConfigError("--openai: the gateway reaches routers in plaintext only; start it without TLS")
    if router.vllm_engine == "off":
        raise ConfigError("--openai needs router.vllm_engine, which is off: leave it at auto")
    if router.token_file is not None:
        raise ConfigError(
            "--openai: the gateway shows routers no token, so router.token_file would refuse it; let a proxy before "
            "the gateway ask for credentials instead"
        )
    if port:
        probe_port(LOOPBACK, port, "choose another with --openai")


def run(arguments: argparse.Namespace) -> int:
    printer = EventPrinter(sys.stdout)
    if arguments.speculative_config is not None and (arguments.draft or arguments.head):
        raise ConfigError("--speculative-config, --draft and --head each say who drafts: choose one")
    vllm = read_vllm_flags(arguments, target=arguments.model or "")
    write_warnings("outrider up", vllm.warnings)
    cluster = make_cluster(
        arguments,
        tls=arguments.tls,
        token_hashes=arguments.token_hashes,
        openai_port=arguments.openai,
        vllm_flags=vllm.overrides,
    )
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
    if cluster.config.draft_nodes and cluster.config.draft_choice.model_id and has_shared_cpus(cluster.config):
        printer.say("the draft model computes on the target's processors, which is slower than --draft none or ngram")
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
                if cluster.config.openai_port is not None:
                    announce_openai(cluster, printer)
                if arguments.tls is not None:
                    printer.say(f"clients: --tls {arguments.tls}")
    finally:
        statuses = cluster.stop()
        if arguments.json_status is not None:
            arguments.json_status.unlink(missing_ok=True)
    if cluster.failure is not None:
        raise PeerLostError(f"{cluster.failure} (logs in {cluster.log_directory})", reason="START_FAILED")
    # Before it serves, a process may still be importing modules: SIGTERM then ends it without a message.
    good = {0} if has_served else {0, -signal.SIGTERM}
    return 0 if set(statuses.values()) <= good else 1


def announce_serving(cluster: Cluster, printer: EventPrinter) -> None:
    """Prints the address and what the decode node reported: numerics, kernels, and other facts."""
    described = next((dict(node.description) for node in cluster.nodes if node.role == "decode_node"), {})
    facts = {name: described[name] for name in SHOWN_FIRST if name in described}
    printer.say(f"serving on {cluster.router_address}")
    if "numerics" in described:
        printer.say(f"numerics: {described['numerics']}")
        printer.say(described["kernels"])
    printer.say(" ".join([f"version={__version__}", *(f"{name}={value}" for name, value in facts.items())]))


def announce_openai(cluster: Cluster, printer: EventPrinter) -> None:
    """Prints the URL for OpenAI's clients, and a request that can be copied."""
    model = cluster.node("openai").description["model"]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    printer.say(f"OpenAI API on {cluster.openai_url}, model {model}; for example:")
    printer.say(f"  curl {cluster.openai_url}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
