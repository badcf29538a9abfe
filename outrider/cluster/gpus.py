"""Assigns GPUs, and shares of their memory, to the nodes of a local cluster. Imports no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.cluster.config import DECODE, DRAFT, PREFILL, ClusterConfig
from outrider.config.resolve import ResolvedConfig
from outrider.engine.device import device_type, has_gpu_driver
from outrider.engine.memory import GPU_SHARE
from outrider.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOOK_AHEAD = "draft_node.look_ahead"
UNNAMED_GPUS = ("",)
"""Stands for a single GPU whose name is unknown, or which is chosen by a setting rather than by the cluster."""
DEVICE_FILES = Path("/dev")
GPU_WEIGHTS = {DECODE: 47, PREFILL: 45, DRAFT: 8}
"""Relative shares of a GPU's memory by role: large for a node with all weights of the target, small for a draft model.
A node gets the GPU on which the shares of earlier nodes have the smallest sum, so a draft model shares a GPU with a
prefill node rather than with a decode node.
"""
KV_WEIGHTS = {DECODE: 60, PREFILL: 25}
"""Relative shares of main memory for KV caches by role. Decode nodes get more, because answers grow on them, whereas
prompts leave prefill nodes.
"""


def assign_gpus(
    config: ClusterConfig,
    settings: ResolvedConfig,
    by_role: Mapping[str, ResolvedConfig] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> tuple[dict[str, dict[str, str]], dict[str, tuple[str, ...]]]:
    """Returns `Launch.node_environ` and `Launch.node_overrides`, which give each computing node its GPUs (out of
    `cluster.gpus`, or of all visible ones) and its share of their memory.

    Each node gets its own GPU, or its own `model.num_ranks` GPUs, while there are enough; further nodes
    share GPUs. If `model.device` names one GPU, such as cuda:1, all nodes share it. `kv_cache.memory` is per node.
    If it comes from another server's file or argument, however, all nodes on a GPU share it; on a CPU all nodes do.
    Draft nodes that share a GPU with a decode node do not look ahead, unless the user has chosen that.

    `settings` has the sections `model` and `kv_cache`; `by_role` has the settings of roles whose sections differ.
    Raises: ConfigError.
    """
    nodes, gpus = config.computing_nodes, _usable_gpus(config.gpus, settings.sections["model"].device, environ)
    if not gpus:
        counts = Counter(nodes.values())
        kv = {name: KV_WEIGHTS[role] / counts[role] for name, role in nodes.items() if role in KV_WEIGHTS}
        return {}, _memory_shares(settings, [kv], default=None)
    placed, loads = {}, Counter[str]()
    for name, role in nodes.items():
        model = (by_role or {}).get(role, settings).sections["model"]
        count = 1 if role == DRAFT else model.num_ranks
        if count > len(gpus) and gpus != UNNAMED_GPUS:
            raise ConfigError(f"model.{model.parallel_setting} {count} needs as many GPUs: {len(gpus)} may be used")
        least = sorted(gpus, key=loads.__getitem__)[:count]
        placed[name] = sorted(least, key=gpus.index)
        loads.update(dict.fromkeys(least, GPU_WEIGHTS[role]))
    groups = [{name: GPU_WEIGHTS[nodes[name]] for name, own in placed.items() if gpu in own} for gpu in gpus]
    shares = _memory_shares(settings, [group for group in groups if len(group) > 1], default=GPU_SHARE)
    chosen = dict.fromkeys(nodes, ("model.device=cuda",) if config.gpus else ())  # no node must fall back to the CPU
    if LOOK_AHEAD not in settings.elsewhere:
        # Processes on a GPU take turns, so look-ahead would take from the target's steps what it gains.
        beside = {name for group in groups if any(nodes[each] == DECODE for each in group) for name in group}
        chosen |= {name: (*chosen[name], f"{LOOK_AHEAD}=off") for name in beside if nodes[name] == DRAFT}
    return (
        {name: {VISIBLE: ",".join(own)} for name, own in placed.items() if gpus != UNNAMED_GPUS},
        {name: (*chosen[name], *shares.get(name, ())) for name in nodes},
    )


def visible_gpus(environ: Mapping[str, str]) -> Sequence[str] | None:
    """Returns the GPUs visible in this environment, named as in CUDA_VISIBLE_DEVICES: by number, UUID or MIG part.

    Without that variable, device files are counted; a container has only those of its own GPUs. Returns None if there
    are no such files, as in WSL, because the GPUs are then unknown.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        return names[: next((place for place, name in enumerate(names) if name in ("", "-1")), None)]  # as CUDA does
    return [str(number) for number, _ in enumerate(DEVICE_FILES.glob("nvidia[0-9]*"))] or None


def _usable_gpus(wanted: Sequence[str], device: str, environ: Mapping[str, str]) -> Sequence[str]:
    """Returns the GPUs in `cluster.gpus`, otherwise all visible ones, and no GPUs if the device is a CPU.

    Returns UNNAMED_GPUS if `device` names a GPU, or if `wanted` is empty and the visible GPUs are unknown.

    Raises: ConfigError if a wanted GPU is missing, or if another setting excludes it.
    """
    if device not in ("auto", "cuda"):
        if wanted:
            raise ConfigError(
                f"cluster.gpus {','.join(wanted)} cannot be combined with model.device {device}: leave one out"
            )
        return UNNAMED_GPUS if device_type(device) == "cuda" else ()
    if not (wanted or device == "cuda" or has_gpu_driver()):
        return ()
    visible = visible_gpus(environ)
    if visible is None:
        return wanted or UNNAMED_GPUS
    for name in wanted:
        if name not in visible and (name.isdigit() or VISIBLE in environ):
            source = f" ({VISIBLE})" if VISIBLE in environ else ""
            there = ",".join(visible) or "none"
            raise ConfigError(f"cluster.gpus {','.join(wanted)}: there is no {name}, only {there}{source}")
    return wanted or visible


def _memory_shares(
    settings: ResolvedConfig, groups: Sequence[Mapping[str, float]], *, default: float | None
) -> dict[str, tuple[str, ...]]:
    """Returns settings of `kv_cache.memory` by node name; none if the nodes' own settings apply.

    `groups` has, for each memory, the relative shares of the nodes that use it. Together these nodes use
    the fraction `default` of the memory, or the fraction in an imported `kv_cache.memory`.
    """
    memory, is_imported = settings.sections["kv_cache"], "kv_cache.memory" in settings.imported
    fraction = memory.size[1] if is_imported else default
    if fraction is None or (memory.memory and not is_imported):
        return {}
    shares: dict[str, float] = {}
    for group in groups:
        for name, weight in group.items():
            share = 100 * fraction * weight / sum(group.values())
            shares[name] = min(share, shares.get(name, share))  # a model on several GPUs uses the same fraction of each
    return {name: (f"kv_cache.memory={share:g}%",) for name, share in shares.items()}
