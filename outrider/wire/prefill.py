"""prefill.proto ⇄ `outrider.prefill`."""

from __future__ import annotations

from outrider.prefill import PrefillCall, PrefillFigures
from outrider.v1 import prefill_pb2


def call_to_proto(call: PrefillCall) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        sequence_group_id=call.sequence_group_id,
        transfer_id=call.transfer_id,
        request_id=call.request_id,
        token_ids=call.token_ids,
        kv_address=call.kv_address,
        decode_incarnation=call.decode_incarnation,
        held_prefix_length=call.held_prefix_length,
        priority=call.priority,
        fingerprint=call.fingerprint,
        cache_salt=call.cache_salt,
    )


def figures_from_proto(proto: prefill_pb2.PrefillResponse) -> PrefillFigures:
    return PrefillFigures(
        num_cached_tokens=proto.num_cached_tokens,
        num_computed_tokens=proto.num_computed_tokens,
        compute_seconds=proto.compute_microseconds / 1e6,
        connector=proto.connector,
        kv_bytes=proto.kv_bytes,
        transfer_seconds=proto.transfer_microseconds / 1e6,
        exposed_seconds=proto.exposed_microseconds / 1e6,
    )
