"""The stage `handoff` of a GPU day, which measures the transfer of KV between two processes, run on a CPU."""

from __future__ import annotations

from checks.gpu_stages.handoff import PLANES, measure


def test_two_processes_hand_kv_over_and_a_connector_that_is_not_here_is_named():
    absent, shared, by_grpc = measure(
        "cpu", "cpu", connectors=("cuda_ipc", "shared_memory", "grpc"), at_once=(2,), num_rounds=1, num_tokens=32
    )
    assert "not on a GPU" in absent["unavailable"]
    assert shared["used"] == shared["connector"] == "shared_memory"
    assert by_grpc["used"] == by_grpc["connector"] == "grpc"
    assert shared["same"]
    assert by_grpc["same"]
    assert shared["mib"] == 2 * 32 * sum(plane.bytes_per_token for plane in PLANES) >> 20
    assert shared["gb_s"] > 0
    assert set(shared["sender_ms"]) == {"read", "room", "put", "commit"}
    assert set(shared["receiver_ms"]) == {"copy", "write", "handle"}
    assert shared["receiver_ms"]["handle"] > shared["receiver_ms"]["write"] > 0
