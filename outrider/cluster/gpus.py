"""Which GPUs the nodes of a local cluster compute on, and how much of their memory each may take. Torch-free."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import DECODE, DRAFT, PREFILL, node_names
from outrider.config.resolve import ResolvedConfig
from outrider.engine.device import device_type, has_gpu_driver
from outrider.engine.memory import GPU_SHARE
from outrider.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
LIST_COMMAND = ("nvidia-smi", "-L")
LIST_SECONDS = 20.0
"""For the driver to begin, where it does not stay loaded."""
GPU_WEIGHTS = {DECODE: 45, PREFILL: 45, DRAFT: 8}
"""By which nodes on one GPU divide its memory: both targets have all weights, a draft model is small."""
KV_WEIGHTS = {DECODE: 60, PREFILL: 25}
"""By which they divide main memory, of which a share is for KV alone: answers grow, prompts are transferred."""
LOADS = {DECODE: 3, PREFILL: 2, DRAFT: 1}
"""Of a GPU, relative to each other: where GPUs are few, decode nodes are the last to share theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What nodes are told, by their names; a node that is not in it is told nothing."""

    environ: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # as `Launch.node_overrides`


def allot(
    config: ClusterConfig,
    settings: ResolvedConfig,
    by_role: Mapping[str, ResolvedConfig] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> Allotment:
    """GPUs for the nodes that compute, by `cluster.gpus`, else those that are visible; and their shares of memory.

    Each node gets a GPU of its own where there are enough, or `model.tensor_parallel_size` of them. Otherwise nodes
    share: their parts add up to nine tenths of a GPU, or to what another server's file or argument asks for. A
    `model.device` such as cuda:1 is one GPU for all, and an explicit `kv_cache.memory` is each node's own.

    `settings` have the sections `model` and `kv_cache`; `by_role` those of roles that differ. Raises: ConfigError.
    """
    device = settings.sections["model"].device
    roles = _computing_nodes(config)
    if config.gpus and device not in ("auto", "cuda"):
        raise ConfigError(f"cluster.gpus {','.join(config.gpus)} does not go with model.device {device}: leave it out")
    gpus: tuple[str, ...] | None = ()
    if config.gpus or device_type(device) == "cuda" or (device == "auto" and has_gpu_driver()):
        gpus = _usable_gpus(config.gpus, environ) if device in ("auto", "cuda") else None
    if gpus == ():
        numbers = Counter(roles.values())
        weights = {name: KV_WEIGHTS[role] / numbers[role] for name, role in roles.items() if role in KV_WEIGHTS}
        return Allotment(overrides=_memory_shares(settings, [weights], default=None))
    if gpus is None:
        weights = {name: GPU_WEIGHTS[role] for name, role in roles.items()}
        return Allotment(overrides=_memory_shares(settings, [weights], default=GPU_SHARE))
    placed = _placed(roles, gpus, settings, by_role or {})
    groups = [{name: GPU_WEIGHTS[roles[name]] for name, own in placed.items() if gpu in own} for gpu in gpus]
    shares = _memory_shares(settings, [group for group in groups if len(group) > 1], default=GPU_SHARE)
    chosen = ("model.device=cuda",) if config.gpus else ()  # a node that cannot use it must not compute on processors
    return Allotment(
        environ={name: {VISIBLE: ",".join(own)} for name, own in placed.items()},
        overrides={name: (*chosen, *shares.get(name, ())) for name in roles},
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs, or parts of them (MIG), that processes with this environment see, as CUDA_VISIBLE_DEVICES names them.

    None: the driver does not tell.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        end = next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return tuple(names[:end])  # as CUDA reads it
    try:
        listed = subprocess.run(  # noqa: S603 the driver's own program
            LIST_COMMAND, capture_output=True, text=True, timeout=LIST_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""
    found: list[str] = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listed)
    if any(name.startswith("MIG") for name in found):  # a GPU that is divided is followed by its parts
        return tuple(
            name for name, after in zip(found, [*found[1:], ""], strict=True) if name[:3] == "MIG" or after[:3] != "MIG"
        )
    try:
        num_gpus = len(found) or len(list(DRIVER_GPUS.iterdir()))
    except OSError:
        return None
    return tuple(map(str, range(num_gpus)))


def _usable_gpus(wanted: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Raises: ConfigError for a wanted one that the environment hides."""
    if not wanted:
        return visible_gpus(environ)
    if VISIBLE in environ and (hidden := sorted(set(wanted) - set(visible_gpus(environ) or ()))):
        raise ConfigError(f"cluster.gpus names {', '.join(hidden)}, which {VISIBLE}={environ[VISIBLE]} hides")
    return tuple(wanted)


def _computing_nodes(config: ClusterConfig) -> dict[str, str]:
    """Their roles by their names, those first that get a GPU first."""
    num_drafts = config.draft_nodes if config.draft_choice.model_id else 0  # prompt lookup needs no device
    counts = {DECODE: config.decode_nodes, PREFILL: config.prefill_nodes, DRAFT: num_drafts}
    return {name: role for role, count in counts.items() for name in node_names(role, count)}


def _placed(
    roles: Mapping[str, str], gpus: Sequence[str], settings: ResolvedConfig, by_role: Mapping[str, ResolvedConfig]
) -> dict[str, tuple[str, ...]]:
    """GPUs by the node's name, those with the least load first. Raises: ConfigError where a node needs more."""
    loads: Counter[str] = Counter()
    placed = {}
    for name, role in roles.items():
        model = by_role.get(role, settings).sections["model"]
        count = 1 if role == DRAFT else model.tensor_parallel_size
        if count > len(gpus):
            raise ConfigError(f"model.tensor_parallel_size {count} needs as many GPUs: {len(gpus)} may be used")
        least = sorted(gpus, key=loads.__getitem__)[:count]
        placed[name] = tuple(sorted(least, key=gpus.index))
        loads.update(dict.fromkeys(least, LOADS[role]))
    return placed


def _memory_shares(
    settings: ResolvedConfig, groups: Sequence[Mapping[str, float]], *, default: float | None
) -> dict[str, tuple[str, ...]]:
    """Settings by the node's name. `groups`: weights of nodes that divide one memory.

    What another server's file or argument asks for is for a group together; without that, `default`.
    """
    memory, is_imported = settings.sections["kv_cache"], "kv_cache.memory" in settings.imported
    fraction = memory.size[1] if is_imported else default
    if fraction is None or (memory.memory and not is_imported):
        return {}
    shares: dict[str, float] = {}
    for group in groups:
        for name, weight in group.items():
            share = 100 * fraction * weight / sum(group.values())
            shares[name] = min(share, shares.get(name, share))  # a model on several GPUs has the same part of each
    return {name: (f"kv_cache.memory={share:g}%",) for name, share in shares.items()}
