"""JSON as a router sends it to its page."""

from __future__ import annotations

from typing import Any


def node(name: str, **fields: Any) -> dict[str, Any]:
    role = name.partition("-")[0]
    return {
        "name": name,
        "role": role,
        "state": "serving",
        "target": f"10.0.0.{len(name)}:7001",
        "step": 4123,
        "num_running": 3,
        "num_waiting": 0,
        "kv_blocks_total": 0 if role == "draft" else 1000,
        "kv_blocks_free": 0 if role == "draft" else 640,
        "tokens_per_second": 71.5,
        "mean_acceptance_length": 2.41 if role == "decode" else 0.0,
        "look_ahead_hit_rate": 0.63 if role == "draft" else 0.0,
        "kv_bytes_per_second": 12_500_000.0 if role == "prefill" else 0.0,
        "numerics": "exact (amx)",
        "version": "1.4.0",
        "is_late": False,
        "error": "",
        **fields,
    }


def cluster(*nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "version": "1.4.0",
        "model": "smollm2-135m-instruct",
        "numerics": "exact (amx)",
        "uptime_seconds": 93_784.0,
        "num_requests_running": 5,
        "num_requests_waiting": 2,
        "num_waiting_tokens": 1480,
        "oldest_wait_seconds": 0.84,
        "num_moves": 3,
        "nodes": list(nodes),
        **fields,
    }


def summary(serial: int, **fields: Any) -> dict[str, Any]:
    return {
        "serial": serial,
        "request_id": f"chat-{serial:08x}",
        "state": "finished",
        "age_seconds": 40.0,
        "queue_seconds": 0.1,
        "ttft_seconds": 0.4,
        "e2e_seconds": 1.2,
        "num_prompt_tokens": 240,
        "num_cached_tokens": 0,
        "num_generated_tokens": 64,
        "num_samples": 1,
        "attempts": 1,
        "nodes": ["prefill-0", "decode-0"],
        "mean_acceptance_length": 2.1,
        "error": "",
        **fields,
    }


def span(kind: str, start: float, end: float | None, node: str = "", **fields: Any) -> dict[str, Any]:
    known = {"attempt": 0, "num_tokens": None, "bytes": None, "detail": ""}
    return {"kind": kind, "node": node, "start": start, "end": end, **known, **fields}


def step(at: float, position: int, num_drafts: int, num_accepted: int, **fields: Any) -> dict[str, Any]:
    return {
        "sample": 0,
        "attempt": 0,
        "node": "decode-0",
        "at": at,
        "position": position,
        "num_tokens": num_accepted + 1,
        "num_draft_tokens": num_drafts,
        "num_accepted": num_accepted,
        "wanted_drafts": True,
        "found_drafts": num_drafts > 0,
        "batch": 5,
        **fields,
    }


def request(serial: int, spans: list[Any], steps: list[Any], moves: list[Any], **fields: Any) -> dict[str, Any]:
    return {
        **summary(serial, **fields),
        "spans": spans,
        "steps": steps,
        "moves": moves,
        "num_dropped_steps": 0,
        **fields,
    }


def moved_request(serial: int = 17) -> dict[str, Any]:
    """Makes a record with 1.90 s in the queue, 0.35 s of prefill in two chunks, 20 ms of transfer, 0.35 s of decoding,
    and from 2.50 s on a move that costs 0.40 s. It has ten steps of three tokens on two nodes, and ends at 3.02 s."""
    spans = [
        span("queue", 0.0, 1.9),
        span("prefill", 1.9, 2.25, "prefill-0", num_tokens=242),
        span("prefill_chunk", 1.9, 2.1, "prefill-0", num_tokens=128),
        span("prefill_chunk", 2.1, 2.25, "prefill-0", num_tokens=114),
        span("kv_frame", 2.05, 2.12, "prefill-0", bytes=2_949_120),
        span("kv_frame", 2.2, 2.27, "prefill-0", bytes=2_626_560),
        span("kv_transfer", 2.06, 2.27, "decode-0", bytes=5_575_680),
        span("decode", 2.27, 2.6, "decode-0"),
        span("queue", 2.6, 2.62, attempt=1),
        span("prefill", 2.62, 2.8, "prefill-0", attempt=1, num_tokens=254),
        span("prefill_chunk", 2.7, 2.8, "prefill-0", attempt=1, num_tokens=254),
        span("decode", 2.85, 3.02, "decode-1", attempt=1),
    ]
    accepted = [2, 2, 1, 3]
    first = [
        step(2.27 + (index + 1) * 0.0575, 242 + 3 * index, 4, number) for index, number in enumerate(accepted)
    ]  # until 2.50 s
    second = [
        step(2.9 + index * 0.024, 254 + 3 * index, 2, 2, node="decode-1", attempt=1) for index in range(6)
    ]  # until 3.02 s
    moves = [{"at": 2.6, "cause": "decode_lost", "node": "decode-0", "error": "the connection was closed"}]
    return request(
        serial,
        spans,
        first + second,
        moves,
        queue_seconds=1.9,
        ttft_seconds=2.3275,
        e2e_seconds=3.02,
        num_prompt_tokens=242,
        num_generated_tokens=30,
        attempts=2,
        nodes=["prefill-0", "decode-0", "decode-1"],
    )
