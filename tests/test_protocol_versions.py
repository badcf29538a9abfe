"""The protocol version that two processes choose from the ranges that they support."""

from __future__ import annotations

import pytest

from outrider.errors import MismatchError
from outrider.node import NodeInfo, NodeRole, NodeState
from outrider.protocol_versions import SUPPORTED_VERSIONS, ProtocolVersions, negotiate
from outrider.wire.node import info_from_proto, info_to_proto


def versions(oldest, newest):
    return ProtocolVersions(oldest=oldest, newest=newest)


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        (versions(2, 2), versions(2, 2), 2),
        (versions(2, 3), versions(2, 2), 2),
        (versions(2, 3), versions(3, 4), 3),
        (versions(1, 9), versions(4, 6), 6),
    ],
)
def test_both_sides_find_the_newest_that_both_speak(ours, theirs, spoken):
    assert negotiate(ours, theirs, us="a", them="b") == spoken
    assert negotiate(theirs, ours, us="b", them="a") == spoken


@pytest.mark.parametrize("theirs", [versions(1, 1), versions(4, 5), ProtocolVersions.of_hello(oldest=0, newest=1)])
def test_ranges_that_do_not_overlap_are_refused_by_name(theirs):
    with pytest.raises(MismatchError) as caught:
        negotiate(versions(2, 3), theirs, us="router r", them="decode node d")
    assert caught.value.message == f"decode node d speaks protocol {theirs}, router r speaks protocol 2 to 3"
    assert caught.value.reason == "PROTOCOL_VERSION_MISMATCH"


def test_a_peer_that_names_no_range_speaks_one_version():
    """Processes of version 1 name no range."""
    proto = info_to_proto(
        NodeInfo(incarnation=bytes(16), name="d", role=NodeRole.DRAFT, state=NodeState.SERVING, version="0")
    )
    proto.protocol_version = 1
    proto.ClearField("oldest_protocol_version")
    assert info_from_proto(proto).protocol_versions == versions(1, 1)
    with pytest.raises(MismatchError):
        negotiate(SUPPORTED_VERSIONS, info_from_proto(proto).protocol_versions, us="router", them="d")
