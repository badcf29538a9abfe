"""The processes of a cluster, with their command lines and environments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cluster.config import DECODE, DRAFT, PREFILL, ClusterConfig, node_names
from outrider.cluster.shares import divide_cpus
from outrider.engine.processor import usable_cpus, within_quota
from outrider.heads.locate import AUTO_HEAD
from outrider.own_modules import module_command
from outrider.service.address import loopback
from outrider.speculation.proposers.factory import NO_PROPOSER

ROUTER = "router"
MODEL = "outrider.cluster.locate_model"
GATEWAY = "outrider.cluster.gateway"
DRAIN_SECONDS = 1.5
"""Default of `server.drain_seconds` in a local cluster: short, so that Ctrl-C takes effect soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings for all processes of a cluster. `overrides` are strings such as "decode_node.max_running_sequences=8".

    `node_overrides` are for single processes, by name ("decode-0"), and take precedence over `overrides`.
    `role_overrides` are for all processes of a role and take precedence over both.
    """

    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    node_overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    role_overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    node_environ: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # added to `environ`, by node name
    log_directory: Path | None = None  # None: a temporary directory, removed if the cluster ends without errors
    command: Callable[[str], Sequence[str]] = module_command  # by role
    locate_model: bool = True  # whether a process runs before all others, locates the model and reports progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process of the cluster."""

    name: str  # "decode-0"
    role: str
    is_one_shot: bool = False


def plan_children(config: ClusterConfig, launch: Launch) -> list[ChildSpec]:
    """Returns the processes in start order: the one that locates the model first, routers and the OpenAI gateway
    last.
    """
    num_drafts = 0 if config.draft == NO_PROPOSER else config.draft_nodes
    counts = ((DRAFT, num_drafts), (PREFILL, config.prefill_nodes), (DECODE, config.decode_nodes))
    children = [ChildSpec(name="model", role=MODEL, is_one_shot=True)] if launch.locate_model else []
    children += [ChildSpec(name=name, role=role) for role, count in counts for name in node_names(role, count)]
    children += [ChildSpec(name=name, role=ROUTER) for name in router_ports(config)]
    return children if config.openai_port is None else [*children, ChildSpec(name="openai", role=GATEWAY)]


def router_ports(config: ClusterConfig) -> dict[str, int]:
    """Returns each router's port by its name: consecutive ports, or all 0 if no port is configured."""
    names = ["router"] if config.routers == 1 else [f"router-{index}" for index in range(config.routers)]
    return {name: config.port + index if config.port else 0 for index, name in enumerate(names)}


def child_command(
    spec: ChildSpec,
    config: ClusterConfig,
    launch: Launch,
    *,
    targets: Mapping[str, Sequence[str]],
    ports: Mapping[str, int],
    turns_file: Path,
) -> list[str]:
    """Returns a process's command line: the cluster's own choices as defaults, the user's settings, which override
    them, and ports.

    `targets` has the other processes' addresses by role. `ports` has the "port" and "metrics_port" that are reserved
    for this process and used unless others are configured. `turns_file` is for nodes that share their processors.
    """
    command = list(launch.command(spec.role))
    if launch.config_file is not None:
        command += ["--config", str(launch.config_file)]
    chosen: dict[str, Any] = {} if spec.is_one_shot else _chosen(spec, config, targets, ports, turns_file)
    for key, value in chosen.items():
        command += ["--default", f"{key}={_text(value)}"]
    settings = [*launch.overrides]
    settings += [*launch.node_overrides.get(spec.name, ()), *launch.role_overrides.get(spec.role, ())]
    if not spec.is_one_shot:  # overrides ports of other sources, which would be the same for all processes
        wanted = config.openai_port if spec.role == GATEWAY else router_ports(config).get(spec.name, 0)
        settings.append(f"server.port={wanted or ports['port']}")
    if spec.role == GATEWAY:  # the gateway does not authenticate its clients, so only this machine may reach it
        settings.append(f"server.host={loopback()}")
    for setting in settings:
        command += ["--set", setting]
    return command


def _chosen(
    spec: ChildSpec,
    config: ClusterConfig,
    targets: Mapping[str, Sequence[str]],
    ports: Mapping[str, int],
    turns_file: Path,
) -> dict[str, Any]:
    """Returns the settings that the cluster itself chooses for one process, by key."""
    role = spec.role
    chosen: dict[str, Any] = {"server.drain_seconds": DRAIN_SECONDS, "server.metrics_port": ports["metrics_port"]}
    cpus = usable_cpus()
    shares = divide_cpus(config, within_quota(cpus))
    own = shares.get(spec.name)
    if own is not None:
        is_shared = [*shares.values()].count(own) > 1
        chosen["model.cpus"] = own if len(within_quota(cpus)) == len(cpus) else ()
        chosen["model.num_threads"] = len(own)
        if is_shared and role in (PREFILL, DECODE):
            chosen["model.turns_file"] = turns_file
        if role == DRAFT:
            chosen["draft_node.look_ahead"] = "off" if is_shared else "auto"
    choice = config.draft_choice
    head = choice.model_id if choice.proposer == "head" else ""
    if head and head != AUTO_HEAD:
        head = str(Path(head).expanduser().absolute())
    if role in (PREFILL, DECODE) and (head or config.draft == NO_PROPOSER):
        chosen["model.head"] = head
    if role == ROUTER:
        chosen["router.prefill_targets"] = targets.get(PREFILL, ())
        chosen["router.decode_targets"] = targets.get(DECODE, ())
        chosen["router.draft_targets"] = targets.get(DRAFT, ())
    elif role == GATEWAY:
        chosen["gateway.router_targets"] = targets.get(ROUTER, ())
    elif role == DECODE:
        chosen["decode_node.draft_targets"] = targets.get(DRAFT, ())
        if head:
            chosen["decode_node.local_head"] = "false"
        if config.draft == NO_PROPOSER:
            chosen["decode_node.local_lookup"] = "none"
            chosen["decode_node.num_speculative_tokens"] = 0
    elif role == DRAFT:
        chosen["draft_node.proposer"] = choice.proposer
        if choice.model_id:
            chosen["draft_node.model"] = head or choice.model_id
    return chosen


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
