"""`python -m benchmarks.kv_hand_off`, on a CPU."""

from __future__ import annotations

from benchmarks.kv_hand_off import PLANES, measure


def test_two_processes_hand_kv_over_and_a_connector_that_cannot_is_named():
    unusable, shared = measure(
        device="cpu", connectors=("cuda_ipc", "shared_memory"), at_once=(2,), num_rounds=1, num_tokens=32
    )
    assert "on no GPU" in unusable["error"]
    assert shared["used"] == shared["connector"] == "shared_memory"
    assert shared["same"]
    assert shared["bytes"] == 2 * 32 * sum(plane.bytes_per_token for plane in PLANES)
    assert shared["gb_s"] > 0
