"""Which GPUs the nodes of a local cluster compute on, and how much of their memory each may take. Torch-free."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import DECODE, DRAFT, PREFILL, node_names
from outrider.config.resolve import ResolvedConfig
from outrider.engine.device import device_type, has_gpu_driver
from outrider.engine.memory import GPU_SHARE
from outrider.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = Path("/dev")
GPU_WEIGHTS = {DECODE: 47, PREFILL: 45, DRAFT: 8}
"""By which nodes divide a GPU: each target has all weights, a draft model is small. A node goes where their sum is
least, so that a draft model is beside a prefill node rather than a decode node."""
KV_WEIGHTS = {DECODE: 60, PREFILL: 25}
"""By which roles divide a share of main memory, which is for KV alone: answers grow, prompts are transferred."""


def allot(
    config: ClusterConfig,
    settings: ResolvedConfig,
    by_role: Mapping[str, ResolvedConfig] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> tuple[dict[str, dict[str, str]], dict[str, tuple[str, ...]]]:
    """`Launch.node_environ` and `node_overrides`: GPUs for the nodes that compute, of `cluster.gpus` or all that are
    visible, and shares of their memory.

    Each node gets one, or `model.tensor_parallel_size`, of its own while there are enough; others share. A
    `model.device` such as cuda:1 is one GPU for all. `kv_cache.memory` is each node's own, unless another server's
    file or argument asks for it: then it is for the nodes of a GPU together, or for all on a CPU.

    `settings` have the sections `model` and `kv_cache`; `by_role` those of roles that differ. Raises: ConfigError.
    """
    device = settings.sections["model"].device
    num_drafts = config.draft_nodes if config.draft_choice.model_id else 0  # prompt lookup needs no device
    counts = {DECODE: config.decode_nodes, PREFILL: config.prefill_nodes, DRAFT: num_drafts}
    roles = {name: role for role, count in counts.items() for name in node_names(role, count)}
    gpus: Sequence[str] | None = ()
    if config.gpus or device_type(device) == "cuda" or (device == "auto" and has_gpu_driver()):
        gpus = _usable_gpus(config.gpus, environ, device)
    if gpus is not None and not gpus:
        kv = {name: KV_WEIGHTS[role] / counts[role] for name, role in roles.items() if role in KV_WEIGHTS}
        return {}, _memory_shares(settings, [kv], default=None)
    if gpus is None:
        everyone = {name: GPU_WEIGHTS[role] for name, role in roles.items()}
        return {}, _memory_shares(settings, [everyone], default=GPU_SHARE)
    placed, loads = {}, Counter[str]()
    for name, role in roles.items():
        count = 1 if role == DRAFT else (by_role or {}).get(role, settings).sections["model"].tensor_parallel_size
        if count > len(gpus):
            raise ConfigError(f"model.tensor_parallel_size {count} needs as many GPUs: {len(gpus)} may be used")
        least = sorted(gpus, key=loads.__getitem__)[:count]
        placed[name] = sorted(least, key=gpus.index)
        loads.update(dict.fromkeys(least, GPU_WEIGHTS[role]))
    groups = [{name: GPU_WEIGHTS[roles[name]] for name, own in placed.items() if gpu in own} for gpu in gpus]
    shares = _memory_shares(settings, [group for group in groups if len(group) > 1], default=GPU_SHARE)
    chosen = ("model.device=cuda",) if config.gpus else ()  # a node that cannot use it must not compute on processors
    return (
        {name: {VISIBLE: ",".join(own)} for name, own in placed.items()},
        {name: (*chosen, *shares.get(name, ())) for name in roles},
    )


def visible_gpus(environ: Mapping[str, str]) -> Sequence[str] | None:
    """The GPUs that processes with this environment see, as CUDA_VISIBLE_DEVICES names them: numbers, UUIDs, MIG parts.

    A container has the device files of its own GPUs only. None: there are none, as in a WSL, so nothing tells.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        return names[: next((place for place, name in enumerate(names) if name in ("", "-1")), None)]  # as CUDA does
    return [str(number) for number, _ in enumerate(DEVICE_FILES.glob("nvidia[0-9]*"))] or None


def _usable_gpus(wanted: Sequence[str], environ: Mapping[str, str], device: str) -> Sequence[str] | None:
    """Those of `cluster.gpus`, or all that are visible. None: which is not known, or not ours to choose.

    Raises: ConfigError for a wanted one that the other settings or the environment exclude.
    """
    if wanted and device not in ("auto", "cuda"):
        raise ConfigError(f"cluster.gpus {','.join(wanted)} does not go with model.device {device}: leave one out")
    if device not in ("auto", "cuda"):
        return None
    if wanted and VISIBLE in environ and not set(wanted) <= set(visible_gpus(environ) or ()):
        raise ConfigError(f"cluster.gpus {','.join(wanted)}: {VISIBLE}={environ[VISIBLE]} hides some of them")
    return wanted or visible_gpus(environ)


def _memory_shares(
    settings: ResolvedConfig, groups: Sequence[Mapping[str, float]], *, default: float | None
) -> dict[str, tuple[str, ...]]:
    """Settings by the node's name. `groups`: weights of nodes that divide one memory, of which they get `default`."""
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
