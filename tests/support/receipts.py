"""Receipts made up without an answer."""

from __future__ import annotations

import json

from outrider.receipt import Receipt


def receipt(request_id, *, hour=1, tokens=3):
    fields = {
        "receipt": 1, "request_id": request_id, "ended_at": f"2026-11-23T{hour:02}:00:00.000000+00:00", "end": "whole",
        "error": "", "e2e_seconds": 1.0, "num_moves": 0, "router": {"name": "router", "version": "1"},
        "model": {"name": "m", "revision": "", "fingerprint": "f", "dtype": "float32"},
        "nodes": [{"name": "n", "role": "decode", "version": "1", "numerics": "exact (x)"}],
        "request": {"request_id": request_id, "stop": {"strings": ["ende: ü \u2028"]}},
        "samples": [{"start_position": 1, "finish_reason": "stop", "token_ids": list(range(tokens))}],
    }  # fmt: skip
    return Receipt.from_line(json.dumps(fields).encode())
