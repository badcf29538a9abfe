"""Converts a receipt's request, a complete GenerateRequest, to and from proto JSON with the names of router.proto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from outrider.v1 import router_pb2


def request_to_receipt(proto: router_pb2.GenerateRequest) -> dict[str, Any]:
    """Converts `proto`, whose prompt is token ids. Its tokens become lists first, which convert ten times as fast."""
    prompt, generated = list(proto.token_ids.ids), list(proto.generated_token_ids)
    del proto.token_ids.ids[:], proto.generated_token_ids[:]
    fields: dict[str, Any] = json_format.MessageToDict(proto, preserving_proto_field_name=True)
    fields["token_ids"] = {"ids": prompt}
    return fields | ({"generated_token_ids": generated} if generated else {})


def request_from_receipt(fields: Mapping[str, Any]) -> router_pb2.GenerateRequest:
    """Raises: ValueError if the fields are not a complete request."""
    try:
        proto: router_pb2.GenerateRequest = json_format.ParseDict(dict(fields), router_pb2.GenerateRequest())
    except (
        *(json_format.ParseError, TypeError, AttributeError, ValueError, RecursionError),
        *(OverflowError, SystemError),  # a number beyond float's range; half of a surrogate pair as a field's name
    ) as error:
        raise ValueError(f"request: {error}") from error
    has_all = proto.token_ids.ids and proto.sampling.HasField("seed") and proto.sampling.HasField("max_tokens")
    if not has_all or not proto.speculation.method:
        raise ValueError("request lacks token_ids, sampling.seed, sampling.max_tokens or speculation.method")
    return proto
