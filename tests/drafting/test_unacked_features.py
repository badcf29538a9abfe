from __future__ import annotations

from outrider.drafting.drafted_sequence import UnackedFeatures

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
