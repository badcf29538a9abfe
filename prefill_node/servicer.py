"""PrefillService: proto in, domain call, proto out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio

from outrider.errors import InvalidRequestError, MismatchError, PeerLostError
from outrider.faults import fault_point
from outrider.kv_transfer.base import ID_BYTES
from outrider.node import ModelInfo
from outrider.request import MAX_CACHE_SALT_BYTES
from outrider.service.open_calls import OpenCalls
from outrider.service.rpc_errors import rpc_errors
from outrider.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node.desk import JobDesk
from prefill_node.jobs import PrefillJob, PrefillResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a request is checked against."""

    node_name: str
    info: ModelInfo
    max_tokens: int  # of one prompt: the model's window, and what the KV pool can hold


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """`serve` is called when the model is there; until then routers are told to come back."""

    def __init__(self) -> None:
        self._desk: JobDesk | None = None
        self._served: ServedModel | None = None
        self.calls = OpenCalls()

    def serve(self, desk: JobDesk, served: ServedModel) -> None:
        self._desk, self._served = desk, served

    async def Prefill(  # noqa: N802 named by the proto
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillResponse:
        self.calls.enter(context)
        async with rpc_errors(context):
            if self._desk is None or self._served is None:
                raise PeerLostError("the prefill node is still loading its model", reason="STARTING")
            fault_point("prefill.received")
            result = await self._desk.run(job_from_proto(request, self._served))
            fault_point("prefill.answered")
            return result_to_proto(result)
        raise AssertionError("rpc_errors ends the call")


def job_from_proto(request: prefill_pb2.PrefillRequest, served: ServedModel) -> PrefillJob:
    """The job, still without its number. Raises: InvalidRequestError, MismatchError."""
    if request.fingerprint != served.info.fingerprint:
        raise MismatchError(
            f"{served.node_name} serves {served.info.name} with fingerprint {served.info.fingerprint}, "
            f"the router asks for fingerprint {request.fingerprint or '(none)'}",
            reason="FINGERPRINT_MISMATCH",
        )
    for name in ("transfer_id", "decode_incarnation"):
        if len(getattr(request, name)) != ID_BYTES:
            raise InvalidRequestError(f"{name} must have {ID_BYTES} bytes", field=name)
    host, _, port = request.kv_address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidRequestError(f"kv_address must be host:port, not {request.kv_address!r}", field="kv_address")
    token_ids = tuple(request.token_ids)
    if not 1 <= len(token_ids) <= served.max_tokens:
        raise InvalidRequestError(
            f"token_ids must be 1 to {served.max_tokens} tokens, not {len(token_ids)}", field="token_ids"
        )
    if max(token_ids) >= served.info.vocab_size:
        raise InvalidRequestError(f"token_ids must be below {served.info.vocab_size}", field="token_ids")
    if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(f"cache_salt has at most {MAX_CACHE_SALT_BYTES} bytes", field="cache_salt")
    if request.held_prefix_length > len(token_ids):
        raise InvalidRequestError("held_prefix_length is more than there are tokens", field="held_prefix_length")
    return PrefillJob(
        job_id=0,
        request_id=request.request_id,
        transfer_id=request.transfer_id,
        token_ids=token_ids,
        kv_address=request.kv_address,
        decode_incarnation=request.decode_incarnation,
        held_prefix_length=request.held_prefix_length,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def result_to_proto(result: PrefillResult) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        num_cached_tokens=result.num_cached_tokens,
        num_computed_tokens=result.num_computed_tokens,
        compute_microseconds=_microseconds(result.compute_seconds),
        connector=result.connector,
        kv_bytes=result.kv_bytes,
        transfer_microseconds=_microseconds(result.transfer_seconds),
        exposed_microseconds=_microseconds(result.exposed_seconds),
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
