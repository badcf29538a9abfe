from __future__ import annotations

from tests.decode_node.drafting.feature_target import FeatureTarget
from tests.support.fake_head import feature_bytes


def test_ranges_of_several_tables_are_read_at_once_in_their_order():
    target, texts = FeatureTarget(), {1: list(range(1, 20)), 2: list(range(50, 63)), 3: [7] * 9}
    for length in (3, 8, 19):  # so that their blocks are mixed
        for sequence_id, text in texts.items():
            if length <= len(text):
                target.compute(sequence_id, text[:length])
    ranges = [(2, 0, 7), (1, 5, 18), (3, 4, 5), (1, 4, 8)]
    read = target.plane.read([(target.tables[sequence_id], start, end) for sequence_id, start, end in ranges])
    assert read == [feature_bytes(texts[sequence_id], start, end) for sequence_id, start, end in ranges]
