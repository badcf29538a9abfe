"""Divides memory between the nodes of a local cluster."""

from __future__ import annotations

from pathlib import Path

from outrider.cluster.config import ClusterConfig

GPU_DRIVER = Path("/dev/nvidiactl")
PREFILL_PERCENT, DECODE_PERCENT = 25, 60
"""Of the memory that is free on a GPU: answers grow, prompts are transferred."""


def shares_of_gpu(config: ClusterConfig, device: str) -> dict[str, tuple[str, ...]]:
    """How much of one GPU each node takes for KV, where all compute on it: alone, one would take most of it."""
    if not device.startswith("cuda") and not (device == "auto" and GPU_DRIVER.exists()):
        return {}
    return shares_of_memory(config, PREFILL_PERCENT + DECODE_PERCENT)


def shares_of_memory(config: ClusterConfig, percent: float) -> dict[str, tuple[str, ...]]:
    """So much of what is free, divided among the nodes that keep KV."""
    shares = (("prefill", config.prefill_nodes, PREFILL_PERCENT), ("decode", config.decode_nodes, DECODE_PERCENT))
    return {
        f"{role}-{index}": (f"kv_cache.memory={percent * part / (PREFILL_PERCENT + DECODE_PERCENT) / count:g}%",)
        for role, count, part in shares
        for index in range(count)
    }
