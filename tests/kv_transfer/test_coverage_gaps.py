from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.coverage import Coverage

SPEC = TransferSpec(
    transfer_id=b"t" * 16,
    incarnation=b"i" * 16,
    start_token=2,
    end_token=12,
    planes=(
        PlaneSpec("k", 3, 4, 1, "float32"),
        PlaneSpec("v", 2, 4, 1, "float32"),
        PlaneSpec("feature-0", 1, 1, 8, "float32"),
    ),
)
CUTS = ([(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(1, 3)])
"""Ways in which different senders may divide the heads."""


def ranges(start, end):
    return st.sets(st.integers(start, end), min_size=2, max_size=2).map(lambda ends: range(min(ends), max(ends)))


@st.composite
def regions(draw, cut):
    plane = draw(st.sampled_from(SPEC.planes))
    heads = range(1) if plane.is_feature else range(*draw(st.sampled_from(cut)))  # features are not divided
    return Region(plane.name, draw(ranges(0, plane.num_layers)), draw(ranges(2, 12)), heads)


def cells(region):
    return {
        (region.plane, layer, token, head)
        for layer in region.layers
        for token in region.tokens
        for head in region.heads
    }


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CUTS).flatmap(lambda cut: st.lists(regions(cut), max_size=12)))
def test_a_transfer_is_complete_until_the_first_token_of_which_a_cell_did_not_arrive(wanted):
    coverage = Coverage(SPEC)
    arrived = set()
    for region in wanted:
        assert coverage.overlaps(region) == bool(arrived & cells(region))
        if not arrived & cells(region):
            coverage.add(region)
            arrived |= cells(region)
    everything = {
        (plane.name, layer, token, head)
        for plane in SPEC.planes
        for layer in range(plane.num_layers)
        for token in range(2, 12)
        for head in range(plane.num_heads)
    }
    assert coverage.complete_until() == min((token for _, _, token, _ in everything - arrived), default=12)
