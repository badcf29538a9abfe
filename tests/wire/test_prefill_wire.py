"""The figures of a prefill call survive the wire, within limits."""

from __future__ import annotations

from outrider.prefill import MAX_TIMED_PARTS, PrefillFigures, TimedPart
from outrider.v1 import prefill_pb2
from outrider.wire.prefill import figures_from_proto, figures_to_proto


def test_figures_survive_the_wire():
    figures = PrefillFigures(
        num_cached_tokens=16,
        num_computed_tokens=40,
        compute_seconds=0.25,
        connector="grpc",
        kv_bytes=2**40,
        call_seconds=0.5,
        chunks=(TimedPart(0.125, 0.25, 32), TimedPart(0.25, 0.375, 8)),
        pushed=(TimedPart(0.125, 0.5, 2**39),),
    )
    data = figures_to_proto(figures).SerializeToString()
    assert figures_from_proto(prefill_pb2.PrefillResponse.FromString(data)) == figures


def test_of_parts_beyond_the_bound_nothing_is_read():
    part = prefill_pb2.ComputedChunk(num_tokens=1)
    pushed = prefill_pb2.PushedKv(kv_bytes=1)
    many = MAX_TIMED_PARTS + 1
    figures = figures_from_proto(prefill_pb2.PrefillResponse(chunks=[part] * many, pushed=[pushed] * many))
    assert len(figures.chunks) == len(figures.pushed) == MAX_TIMED_PARTS
