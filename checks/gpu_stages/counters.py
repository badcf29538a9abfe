"""What the nodes' own metrics say of a time: how its steps were spent, and what became of drafts."""

from __future__ import annotations

import urllib.request
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.cluster import Cluster

PARTS = "outrider:step_part_seconds_total"
SHOWN_PART_MS = 0.01


def read_counters(cluster: Cluster, name: str) -> Counter[str]:
    """Returns the counters of a node by name, with the labels' values except the model's: "…_total decoded"."""
    found = Counter[str]()
    with urllib.request.urlopen(f"http://{cluster.node(name).metrics_address}/metrics", timeout=5) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
                found[" ".join([sample.name, *labels])] += sample.value
    return found


def describe_decoding(spent: Counter[str]) -> dict[str, Any]:
    """Returns figures of a decode node from the differences of its counters over a time."""
    steps = spent["outrider:step_seconds_count"] or 1
    parts = {key.split()[1]: 1e3 * value / steps for key, value in spent.items() if key.startswith(PARTS)}
    hits = spent["outrider:draft_hit_steps_total"]
    sources = {
        f"{what}_of_{key.split()[1]}": int(value)
        for what in ("draft", "accepted")
        for key, value in spent.items()
        if value and key.startswith(f"outrider:source_{what}_tokens_total")
    }
    return {
        "steps": int(steps),
        "part_ms": {name: round(ms, 3) for name, ms in sorted(parts.items()) if ms >= SHOWN_PART_MS and name != "idle"},
        "wanted": int(spent["outrider:draft_wanting_steps_total"]),
        "found": int(hits),
        "early_ms": round(1e3 * spent["outrider:draft_lead_seconds_total"] / hits, 2) if hits else None,
        "stale": int(spent["outrider:proposals_refused_total stale"]),
        **sources,
    }


def describe_drafting(spent: Counter[str]) -> dict[str, Any]:
    """Returns figures of a draft node from the differences of its counters over a time."""
    steps = spent["outrider:step_seconds_count"]
    return {
        "steps": int(steps),
        "busy_ms": round(1e3 * spent["outrider:step_seconds_sum"]),
        "tokens": int(spent["vllm:generation_tokens_total"]),
        "ahead": int(spent["outrider:draft_ahead_tokens_total"]),
        "wasted": int(spent["outrider:draft_wasted_tokens_total"]),
    }
