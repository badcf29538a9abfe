"""Divides memory between the nodes of a local cluster."""

from __future__ import annotations

from pathlib import Path

from outrider.cluster.config import ClusterConfig
from outrider.config.resolve import ResolvedConfig

GPU_DRIVER = Path("/dev/nvidiactl")
PREFILL_PERCENT, DECODE_PERCENT = 25, 60
"""Of the memory that is free on a GPU: answers grow, prompts are transferred."""


def memory_shares(config: ClusterConfig, settings: ResolvedConfig) -> dict[str, tuple[str, ...]]:
    """KV memory by node, as `Launch.node_overrides`. `settings` have the sections `model` and `kv_cache`.

    What another server's file or argument asks for is for all nodes together. Otherwise nodes divide the GPU on which
    all compute, unless settings say how much each takes.
    """
    kv_cache, device = settings.sections["kv_cache"], settings.sections["model"].device
    if "kv_cache.memory" in settings.imported:
        _, fraction = kv_cache.size
        percent = 100 * (fraction or 0.0)
    elif not kv_cache.memory and (device.startswith("cuda") or (device == "auto" and GPU_DRIVER.exists())):
        percent = PREFILL_PERCENT + DECODE_PERCENT  # alone, one would take most of it
    else:
        return {}
    shares = (("prefill", config.prefill_nodes, PREFILL_PERCENT), ("decode", config.decode_nodes, DECODE_PERCENT))
    return {
        f"{role}-{index}": (f"kv_cache.memory={percent * part / (PREFILL_PERCENT + DECODE_PERCENT) / count:g}%",)
        for role, count, part in shares
        for index in range(count)
    }
