"""Under which host a decode node tells prefill nodes to reach it."""

from __future__ import annotations

import pytest

from decode_node.ingest import _host_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("", ""),
        ("decode.internal", "decode.internal"),
        ("decode.internal:50052", "decode.internal"),
        ("10.0.0.7:50052", "10.0.0.7"),
        ("[fd00::7]:50052", "[fd00::7]"),
        ("[fd00::7]", "[fd00::7]"),
        ("fd00::7", "[fd00::7]"),
    ],
)
def test_the_host_of_an_advertised_address(address, host):
    assert _host_of(address) == host
