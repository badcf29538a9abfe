"""Under which host a decode node tells prefill nodes to reach it."""

from __future__ import annotations

import pytest

from decode_node import ingest
from decode_node.ingest import kv_host


@pytest.mark.parametrize(
    ("bound", "advertised", "reached", "host"),
    [
        ("0.0.0.0", "decode.internal", "10.0.0.7", "decode.internal"),
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1"),
        ("10.1.0.7", "", "10.0.0.7", "10.1.0.7"),
        ("fd00::7", "", "[fd00::8]", "[fd00::7]"),
        ("0.0.0.0", "", "10.0.0.7", "10.0.0.7"),
        ("::", "", "[fd00::7]", "[fd00::7]"),
        ("0.0.0.0", "", "127.0.0.1", "own"),
        ("0.0.0.0", "", "0.0.0.0", "own"),
        ("::", "", "[::1]", "own"),
        ("0.0.0.0", "", "localhost", "own"),
    ],
)
def test_the_host_that_prefill_nodes_dial(monkeypatch, bound, advertised, reached, host):
    monkeypatch.setattr(ingest, "own_host", lambda: "own")
    assert kv_host(bound, advertised, reached) == host
