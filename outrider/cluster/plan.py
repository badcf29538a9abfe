"""The processes of a cluster, with command and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.cluster.config import DRAFT_MODEL_PREFIX, ClusterConfig
from outrider.cluster.cpu_shares import divide_cpus
from outrider.config import environment_name
from outrider.engine.processor import usable_cpus
from outrider.errors import ConfigError

DRAFT, PREFILL, DECODE, ROUTER = "draft_node", "prefill_node", "decode_node", "router"
MODEL = "outrider.cluster.locate_model"


def module_command(role: str) -> list[str]:
    """How a role is started."""
    return [sys.executable, "-m", role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all processes of a cluster get. `overrides` are "decode_node.max_running_sequences=8".

    `node_overrides` are for one process each, by its name ("decode-0"), and come after the others.
    """

    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    node_overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    log_directory: Path | None = None  # None: a temporary one, removed after an end without errors
    command: Callable[[str], Sequence[str]] = module_command
    locate_model: bool = True

    def sets(self, key: str) -> bool:
        """Whether the user has set this key anywhere, so that the cluster's own choice must yield."""
        if any(override.partition("=")[0].strip() == key for override in self.overrides):
            return True
        return environment_name(key) in self.environ or _is_in_file(self.config_file, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process of the cluster."""

    name: str  # "decode-0"
    role: str
    is_one_shot: bool = False


def plan_children(config: ClusterConfig, launch: Launch) -> list[ChildSpec]:
    """In the order of their start; the model's own process first, routers last.

    Raises: ConfigError for several routers without a port to count from.
    """
    if config.routers > 1 and config.port is None:
        raise ConfigError("cluster.routers: several routers need cluster.port, from which theirs are counted")
    num_drafts = 0 if config.draft == "none" else config.draft_nodes
    counts = ((DRAFT, num_drafts), (PREFILL, config.prefill_nodes), (DECODE, config.decode_nodes))
    children = [ChildSpec(name="model", role=MODEL, is_one_shot=True)] if launch.locate_model else []
    children += [
        ChildSpec(name=f"{role.removesuffix('_node')}-{index}", role=role)
        for role, count in counts
        for index in range(count)
    ]
    names = ["router"] if config.routers == 1 else [f"router-{index}" for index in range(config.routers)]
    return [*children, *(ChildSpec(name=name, role=ROUTER) for name in names)]


def router_ports(config: ClusterConfig) -> dict[str, int]:
    """Of several routers, by name: consecutive, or all 0. Empty for one router, whose settings say it."""
    if config.routers == 1:
        return {}
    assert config.port is not None, "plan_children has checked it"
    return {f"router-{index}": config.port + index if config.port else 0 for index in range(config.routers)}


def child_command(
    spec: ChildSpec,
    config: ClusterConfig,
    launch: Launch,
    *,
    targets: Mapping[str, Sequence[str]],
    bound: Mapping[str, int | None],
    turns_file: Path,
) -> list[str]:
    """The command line.

    `targets`: addresses by role. `bound`: "port" and "metrics_port" of an earlier life.
    `turns_file`: for nodes on the same processors.
    """
    command = list(launch.command(spec.role))
    if launch.config_file is not None:
        command += ["--config", str(launch.config_file)]
    chosen: dict[str, Any] = {} if spec.is_one_shot else _chosen(spec, config, targets, turns_file)
    settings = [f"{key}={_text(value)}" for key, value in chosen.items() if not launch.sets(key)]
    settings += [*launch.overrides, *launch.node_overrides.get(spec.name, ())]
    if spec.name in (ports := router_ports(config)):  # over all sources: a port in them is one for all routers
        settings.append(f"router.server.port={ports[spec.name]}")
    settings += [f"{spec.role}.server.{name}={port}" for name, port in bound.items() if port is not None]
    for setting in settings:
        command += ["--set", setting]
    return command


def _chosen(
    spec: ChildSpec, config: ClusterConfig, targets: Mapping[str, Sequence[str]], turns_file: Path
) -> dict[str, Any]:
    """The cluster's own settings for one process."""
    role = spec.role
    chosen: dict[str, Any] = {f"{role}.server.drain_seconds": config.drain_seconds}
    section = {PREFILL: "model", DECODE: "model", DRAFT: "draft_node.model"}.get(role)
    share = divide_cpus(config, usable_cpus()).get(spec.name)
    if section is not None and share is not None:
        chosen[f"{section}.cpus"] = share.cpus
        chosen[f"{section}.num_threads"] = share.num_threads
        if share.is_shared and role in (PREFILL, DECODE):
            chosen[f"{role}.turns_file"] = turns_file
        if role == DRAFT:
            chosen["draft_node.shares_processors"] = share.is_shared
    if config.metrics:
        chosen[f"{role}.server.metrics_port"] = 0
    if role == ROUTER:
        if config.port is not None:
            chosen["router.server.port"] = config.port
        chosen["router.prefill_targets"] = targets.get(PREFILL, ())
        chosen["router.decode_targets"] = targets.get(DECODE, ())
        chosen["router.draft_targets"] = targets.get(DRAFT, ())
    elif role == DECODE:
        chosen["decode_node.draft_targets"] = targets.get(DRAFT, ())
        if share is not None and share.is_shared and config.draft.startswith(DRAFT_MODEL_PREFIX):
            chosen["decode_node.drafts_share_processors"] = True
        if config.draft == "none":
            chosen["decode_node.local_fallback"] = "none"
            chosen["decode_node.num_speculative_tokens"] = 0
    elif role == DRAFT:
        chosen["draft_node.proposer"] = "draft_model" if config.draft.startswith(DRAFT_MODEL_PREFIX) else config.draft
        if config.draft.startswith(DRAFT_MODEL_PREFIX):
            chosen["draft_node.model.id"] = config.draft.removeprefix(DRAFT_MODEL_PREFIX)
    return chosen


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _is_in_file(path: Path | None, key: str) -> bool:
    if path is None:
        return False
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
