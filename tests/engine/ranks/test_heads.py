from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.ranks.sharded_cache import shares_of, split_heads


def test_heads_are_split_in_order_and_evenly():
    assert split_heads(8, 1) == (range(8),)
    assert split_heads(8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    for num_ranks in (3, 16):
        with pytest.raises(ValueError, match="8 heads"):
            split_heads(8, num_ranks)


@given(st.data())
def test_shares_say_of_each_head_who_holds_it_and_where_it_goes(data):
    num_ranks = data.draw(st.integers(1, 5))
    ranges = split_heads(num_ranks * data.draw(st.integers(1, 4)), num_ranks)
    num_heads = ranges[-1].stop
    start = data.draw(st.integers(0, num_heads - 1))
    heads = range(start, data.draw(st.integers(start + 1, num_heads)))
    placed = {}
    for share in shares_of(heads, ranges):
        assert len(share.local) == len(share.place)
        for local, place in zip(share.local, share.place, strict=True):
            placed[place] = ranges[share.rank][local]
    assert placed == dict(enumerate(heads))
