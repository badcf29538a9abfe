"""A decode node's KV address, and when received frames are written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from decode_node import ingest
from decode_node.ingest import kv_host
from outrider.kv_transfer.base import Region
from outrider.kv_transfer.reserved_blocks import ReservedBlocks


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


def test_all_frames_of_a_transfer_wait_for_what_was_queued_when_its_blocks_were_reserved():
    """On a GPU, with a fence for each frame, a frame would wait for the step that is running when it arrives."""
    fences, waited_for = iter(["reserved", "later"]), []
    cache = SimpleNamespace(
        block_size=16,
        fence=lambda: next(fences),
        write=lambda *arguments, heads: waited_for.append(arguments[4]),
    )
    sink = ReservedBlocks(cache, [3, 4])
    for start in (0, 8):
        sink.write(
            Region("k", range(2), range(start, start + 8), range(1)),
            memoryview(b""),
        )
    assert waited_for == ["reserved", "reserved"]
