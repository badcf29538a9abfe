from __future__ import annotations

from decode_node.drafting.drafted_sequence import MAX_UNACKED_BYTES, UnackedFeatures

SIZE = 4


def numbered(start, end) -> bytes:
    return b"".join(number.to_bytes(SIZE, "little") for number in range(start, end))


def test_what_is_acknowledged_goes_and_the_rest_is_sent_again():
    features = UnackedFeatures(SIZE)
    assert features.add(0, numbered(0, 10))
    assert features.take(6, 1000) == (numbered(0, 6), 6)
    features.acknowledge(4)
    assert (features.num_acked, features.num_sent, features.end) == (4, 6, 10)
    assert features.take(100, 1000) == (numbered(4, 10), 10)
    features.acknowledge(2)
    assert features.num_acked == 4, "an older answer"


def test_an_update_takes_whole_features_and_none_before_what_is_acknowledged():
    features = UnackedFeatures(SIZE)
    features.add(0, numbered(0, 10))
    features.take(10, 1000)
    features.acknowledge(8)
    assert features.take(10, 2 * SIZE - 1) == (numbered(8, 9), 9)
    assert features.take(10, SIZE - 1) == (b"", 8)
    assert features.take(5, 1000) == (b"", 8)


def test_what_does_not_follow_is_not_added():
    features = UnackedFeatures(SIZE)
    features.add(0, numbered(0, 4))
    features.take(4, 1000)
    features.acknowledge(4)
    features.begin_again()
    assert not features.add(4, numbered(4, 6))
    assert features.end == 0
    assert features.add(0, numbered(0, 2))


def test_room_is_counted_in_bytes_and_comes_back_with_acknowledgements():
    features = UnackedFeatures(MAX_UNACKED_BYTES // 4)
    features.add(0, bytes(MAX_UNACKED_BYTES // 4 * 4))
    assert features.room == 0
    features.take(4, MAX_UNACKED_BYTES)
    features.acknowledge(3)
    assert features.room == 3
