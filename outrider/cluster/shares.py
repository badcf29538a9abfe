"""Divides processors and threads between the computing nodes of a local cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cluster.config import ClusterConfig
from outrider.engine.processor import usable_cpus, within_quota

FEWEST_TO_DIVIDE = 6
"""With fewer processors all roles share them: an idle role's own would be wasted."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Processors of one process, each for one of its threads."""

    cpus: tuple[int, ...]
    is_shared: bool = False  # with all others that compute


def divide_cpus(config: ClusterConfig, cpus: Sequence[int]) -> dict[str, CpuShare]:
    """By the name of each process that computes ("decode-0", "prefill-0", with a draft model "draft-0").

    On few processors all processes share all of them: prefill and decode nodes in turns
    (see outrider.engine.cpu_turns), a draft model beside them; a phase of a native step waits
    for no thread that has lost its core, so that sharing costs time but never stalls. On more,
    decode nodes come first with half of them, since every token waits for a decode step;
    prefill nodes get the rest, so that no chunk holds up a running decode; a draft model
    takes an eighth of all from them; and one processor stays free for router, n-gram
    drafter and clients.

    Args:
        config: how many nodes there are.
        cpus: that may be used; at least one.
    """
    has_draft_model = bool(config.draft_choice.model_id)
    names = {
        "decode": [f"decode-{index}" for index in range(config.decode_nodes)],
        "prefill": [f"prefill-{index}" for index in range(config.prefill_nodes)],
        "draft": [f"draft-{index}" for index in range(config.draft_nodes)] if has_draft_model else [],
    }
    everyone = [name for role in names.values() for name in role]
    if len(cpus) < max(FEWEST_TO_DIVIDE, 2 * len(everyone)):
        return dict.fromkeys(everyone, CpuShare(tuple(cpus), is_shared=len(everyone) > 1))
    free = cpus[1:]
    num_draft = max(len(names["draft"]), len(cpus) // 8) if names["draft"] else 0
    num_decode = max(len(names["decode"]), (len(free) - num_draft + 1) // 2)
    decode, draft = free[:num_decode], free[num_decode : num_decode + num_draft]
    prefill = free[num_decode + num_draft :]
    return _divide(names["decode"], decode) | _divide(names["prefill"], prefill) | _divide(names["draft"], draft)


def has_shared_cpus(config: ClusterConfig) -> bool:
    """Whether the computing nodes of a cluster on this machine share its processors."""
    return any(share.is_shared for share in divide_cpus(config, within_quota(usable_cpus())).values())


def _divide(names: Sequence[str], cpus: Sequence[int]) -> dict[str, CpuShare]:
    """Divides neighbouring processors as evenly as possible."""
    bounds = [len(cpus) * index // len(names) for index in range(len(names) + 1)] if names else []
    parts = [tuple(cpus[start:end]) for start, end in itertools.pairwise(bounds)]
    return {name: CpuShare(part) for name, part in zip(names, parts, strict=True)}
