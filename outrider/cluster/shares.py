"""Divides processors and threads among the computing nodes of a local cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outrider.cluster.config import DECODE, DRAFT, PREFILL, ClusterConfig
from outrider.engine.processor import usable_cpus, within_quota

FEWEST_TO_DIVIDE = 6
"""Minimum number of processors to be divided among roles. With fewer, all roles share them, because processors of an
idle role would be wasted.
"""


def divide_cpus(config: ClusterConfig, cpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns processors, one per thread, by the name of each computing process (see `ClusterConfig.computing_nodes`).

    If there are few processors, all processes share them: prefill and decode nodes take turns (see
    outrider.engine.cpu_turns), and a draft model runs next to them. Sharing costs time but never stalls, because a
    phase of a native step waits for no thread that has lost its core.

    Otherwise one processor stays free for the router, the n-gram drafter and clients, and a draft model gets an eighth
    of all. Of the remaining ones, decode nodes get half, since every token waits for a decode step, and prefill nodes
    get the other half, so that no chunk delays a running decode. Without prefill nodes, decode nodes get both halves.

    Args:
        config: the numbers of nodes.
        cpus: the usable processors; at least one.
    """
    nodes = config.computing_nodes
    if len(cpus) < max(FEWEST_TO_DIVIDE, 2 * len(nodes)):
        return dict.fromkeys(nodes, tuple(cpus))
    decode, prefill, draft = ([name for name in nodes if nodes[name] == role] for role in (DECODE, PREFILL, DRAFT))
    free = cpus[1:]
    num_draft = max(len(draft), len(cpus) // 8) if draft else 0
    num_targets = len(free) - num_draft
    num_decode = max(len(decode), (num_targets + 1) // 2) if prefill else num_targets
    of_drafts = free[num_decode : num_decode + num_draft]
    of_prefill = free[num_decode + num_draft :]
    return _divide(decode, free[:num_decode]) | _divide(prefill, of_prefill) | _divide(draft, of_drafts)


def has_shared_cpus(config: ClusterConfig) -> bool:
    """Whether the computing nodes of a cluster on this machine share its processors."""
    shares = divide_cpus(config, within_quota(usable_cpus()))
    return len(set(shares.values())) < len(shares)


def _divide(names: Sequence[str], cpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Divides processors into contiguous ranges, as evenly as possible."""
    bounds = [len(cpus) * index // len(names) for index in range(len(names) + 1)] if names else []
    return {name: tuple(cpus[start:end]) for name, (start, end) in zip(names, itertools.pairwise(bounds), strict=True)}
