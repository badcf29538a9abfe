from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import MAX_MISSING, Region, TransferSpec
from outrider.kv_transfer.coverage import Coverage

SPEC = TransferSpec(
    transfer_id=b"t" * 16,
    incarnation=b"i" * 16,
    start_token=2,
    end_token=12,
    planes=(PlaneSpec("k", 3, 4, 1, "float32"), PlaneSpec("v", 2, 4, 1, "float32")),
)
CUTS = ([(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(1, 3)])
"""Of heads, by different senders."""


@st.composite
def regions(draw, cut):
    start_head, end_head = draw(st.sampled_from(cut))
    plane = draw(st.sampled_from(SPEC.planes))
    start_layer = draw(st.integers(0, plane.num_layers - 1))
    start_token = draw(st.integers(2, 11))
    return Region(
        plane=plane.name,
        start_layer=start_layer,
        end_layer=draw(st.integers(start_layer + 1, plane.num_layers)),
        start_token=start_token,
        end_token=draw(st.integers(start_token + 1, 12)),
        start_head=start_head,
        end_head=end_head,
    )


def cells(region):
    return {
        (region.plane, layer, token, head)
        for layer in region.layers
        for token in range(region.start_token, region.end_token)
        for head in region.heads
    }


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CUTS).flatmap(lambda cut: st.lists(regions(cut), max_size=12)))
def test_gaps_are_exactly_the_cells_that_did_not_arrive(wanted):
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
        for head in range(4)
    }
    assert coverage.complete_until() == min((token for _, _, token, _ in everything - arrived), default=12)
    missing = coverage.missing()
    gaps = [cell for region in missing for cell in cells(region)]
    if len(missing) < MAX_MISSING:
        assert sorted(gaps) == sorted(everything - arrived)
    else:
        assert len(gaps) == len(set(gaps))
        assert set(gaps) <= everything - arrived
