"""Timelines as JSON values: seconds since the request's arrival, null for what has not happened or is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.timeline import Move, Span, Step, Timeline

TokenText = Callable[[int], str]
"""A token's text, alone."""


def summary_json(timeline: Timeline, now: float) -> dict[str, Any]:
    """`now`: monotonic seconds."""

    def since_arrival(at: float | None) -> float | None:
        return None if at is None else round(at - timeline.arrived_at, 6)

    return {
        "serial": timeline.serial,
        "request_id": timeline.request_id,
        "state": timeline.state,
        "age_seconds": since_arrival(now),
        "queue_seconds": since_arrival(timeline.admitted_at),
        "ttft_seconds": since_arrival(timeline.first_token_at),
        "e2e_seconds": since_arrival(timeline.ended_at),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_generated_tokens": timeline.num_generated_tokens,
        "num_samples": timeline.num_samples,
        "attempts": 1 + timeline.num_moves,
        "nodes": list(timeline.nodes),
        "mean_acceptance_length": round(timeline.speculation.metrics().mean_acceptance_length, 3),
        "error": timeline.error,
    }


def span_json(span: Span, arrived_at: float) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "attempt": span.attempt,
        "node": span.node,
        "start": round(span.start - arrived_at, 6),
        "end": None if span.end is None else round(span.end - arrived_at, 6),
        "num_tokens": span.num_tokens,
        "bytes": span.num_bytes,
        "detail": span.detail,
    }


def step_json(step: Step, nodes: Sequence[str], arrived_at: float, text: TokenText | None) -> dict[str, Any]:
    """`nodes`: by attempt. `text`: None where text is not to be shown."""
    values = step._asdict() | {"node": nodes[step.attempt], "at": round(step.at - arrived_at, 6)}
    shown = {"tokens": values.pop("token_ids"), "rejected": values.pop("rejected_token_ids")}
    return values if text is None else values | {name: list(map(text, ids)) for name, ids in shown.items()}


def move_json(move: Move, arrived_at: float) -> dict[str, Any]:
    return move._asdict() | {"at": round(move.at - arrived_at, 6)}
