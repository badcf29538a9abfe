"""Converts prefill.proto to and from `outrider.prefill`."""

from __future__ import annotations

from outrider.prefill import MAX_TIMED_PARTS, PrefillCall, PrefillFigures, TimedPart
from outrider.v1 import prefill_pb2
from outrider.wire.fields import Fields
from outrider.wire.request import OPTIONS

CALL = Fields(PrefillCall, prefill_pb2.PrefillRequest, elsewhere=("traceparent",), options=OPTIONS)
_FIGURES = Fields(
    PrefillFigures,
    prefill_pb2.PrefillResponse,
    chunks=Fields(TimedPart, prefill_pb2.ComputedChunk, names={"amount": "num_tokens"}),
    pushed=Fields(TimedPart, prefill_pb2.PushedKv, names={"amount": "kv_bytes"}),
)

figures_to_proto = _FIGURES.to_proto


def figures_from_proto(proto: prefill_pb2.PrefillResponse) -> PrefillFigures:
    """Converts a response. Drops parts beyond `MAX_TIMED_PARTS`, since a correct node sends no more."""
    del proto.chunks[MAX_TIMED_PARTS:]
    del proto.pushed[MAX_TIMED_PARTS:]
    return _FIGURES.from_proto(proto)
