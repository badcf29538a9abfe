"""Rejects calls by unknown callers, calls beyond the limit, and invalid requests before they reach a servicer."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    OutriderError,
    UnauthenticatedError,
)
from outrider.rpc.tls import PeerSecurity
from outrider.service.health import HEALTH_SERVICE
from outrider.service.node_service import SERVICE_NAME as NODE_SERVICE
from outrider.service.open_calls import OpenCalls
from outrider.service.reflection import REFLECTION_SERVICES
from outrider.service.rpc_errors import Context, abort_with

ROUTER_SERVICE = "outrider.v1.RouterService"
ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"
ENGINE_MODEL_KEY = "model-bin"
"""Key of a call's metadata that names the model or adapter, for which the engine service's requests have no field."""
CLIENT_SERVICES = frozenset({ROUTER_SERVICE, ENGINE_SERVICE})
"""Services that a router offers to clients."""
OPEN_SERVICES = frozenset({HEALTH_SERVICE, *REFLECTION_SERVICES, *CLIENT_SERVICES})
"""Services open to everyone who passes the TLS handshake. A router also requires tokens from its clients."""

PROBED_SERVICES = frozenset({HEALTH_SERVICE, NODE_SERVICE})
"""Services through which others probe a process's state."""
UNCOUNTED_METHODS = frozenset(
    {f"/{ROUTER_SERVICE}/Abort", f"/{ENGINE_SERVICE}/Abort", f"/{ENGINE_SERVICE}/HealthCheck"}
)
"""Methods of client services whose calls do not count towards the limit: they free resources or are a gateway's probe.
"""
MAX_REQUEST_BYTES = 2 * 1024 * 1024
"""Maximum size of a unary request. Parsing a larger one would hold up every stream of the process for too long."""
RETRY_SECONDS = 1.0

Handler = Any
"""A grpc.RpcMethodHandler, which is generic only in its stubs."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Authenticate = Callable[[Iterable[tuple[str, str | bytes]] | None], object]
"""Checks a call's metadata before its message is read; raises UnauthenticatedError."""

_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class RequestLimits(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server. Owned by the event loop.

    - RouterService and the engine service are for clients that `authenticate` accepts, health and reflection are for
      everyone, NodeService is for services of the cluster and operators, and all other services are for the cluster.
    - Calls beyond `max_calls` are rejected. Probes and calls that free resources are not counted: a process at its
      limit must still look alive, and must accept calls that reduce its load. Probe streams have a separate limit of
      the same size.
    - Unary requests that are too large or do not parse end with INVALID_ARGUMENT: gRPC parses on the event loop, where
      16 MiB of empty submessages take seconds, and its parser's exceptions would become UNKNOWN. Servicers check the
      messages of request streams (`rpc_errors`), whose senders are nodes and routers.
    """

    def __init__(
        self,
        *,
        calls: OpenCalls,
        max_calls: int,
        security: PeerSecurity,
        authenticate: Authenticate | None,
    ) -> None:
        """`calls` holds the calls that count towards the limit."""
        self._calls = calls
        self._watches = OpenCalls()
        self._max_calls = max_calls
        self._security = security
        self._authenticate = authenticate
        self._guarded: dict[str, Handler] = {}  # by method

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        method = details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(handler, method)
        if self._authenticate is not None and _service_of(method) in CLIENT_SERVICES:
            try:
                self._authenticate(details.invocation_metadata)
            except UnauthenticatedError as error:
                return self._reject_with(error, guarded)
        return guarded

    def _guard(self, handler: Handler, method: str) -> Handler:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        service = _service_of(method)
        calls: OpenCalls | None = self._calls
        if service in PROBED_SERVICES or method in UNCOUNTED_METHODS:
            calls = self._watches if handler.response_streaming else None

        async def answer(request: Any, context: Context) -> Any:
            await self._check(request, context, service, calls)
            return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(request, context, service, calls)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        parse = handler.request_deserializer
        return _MAKE[handler.request_streaming, handler.response_streaming](
            stream if inspect.isasyncgenfunction(behaviour) else answer,
            request_deserializer=parse if handler.request_streaming or parse is None else self._reader(parse),
            response_serializer=handler.response_serializer,
        )

    async def _check(self, request: Any, context: Context, service: str, calls: OpenCalls | None) -> None:
        """Ends a call that is not allowed. Counts an allowed call in `calls` until its status has been sent."""
        error: OutriderError | None = None
        if self._security.is_enabled and service not in OPEN_SERVICES:
            caller = context.auth_context()
            is_operator = service == NODE_SERVICE and self._security.is_operator(caller)
            if not is_operator and not self._security.is_peer(caller):
                await abort_with(context, NotAllowedError(self._security.explain_refusal(caller)))
        if calls is not None and len(calls) >= self._max_calls:
            message = f"{len(calls)} calls are open, as many as server.max_concurrent_rpcs allows"
            error = CapacityError(message, retry_after_seconds=RETRY_SECONDS, reason="TOO_MANY_CALLS")
        elif isinstance(request, InvalidRequestError):
            error = request
        if error is not None:
            if service in CLIENT_SERVICES:
                self._calls.on_refused(error)
            await abort_with(context, error)
        if calls is not None:
            calls.enter(context)

    def _reject_with(self, error: OutriderError, guarded: Handler) -> Handler:
        """Returns a handler that ends the call with this error and does not read the call's messages."""

        async def refuse(_request: Any, context: Context) -> None:
            self._calls.on_refused(error)
            await abort_with(context, error)

        return _MAKE[guarded.request_streaming, guarded.response_streaming](refuse)

    def _reader(self, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Wraps `parse` so that it returns an InvalidRequestError in place of a request that cannot be read."""

        def read(data: bytes) -> Any:
            if len(data) > MAX_REQUEST_BYTES:
                return InvalidRequestError(
                    f"the request has {len(data)} bytes; at most {MAX_REQUEST_BYTES} are allowed",
                    field="",
                    reason="REQUEST_TOO_LARGE",
                )
            try:
                return parse(data)
            except DecodeError:
                return InvalidRequestError("the request does not parse: is a text not UTF-8?", field="")

        return read


def _service_of(method: str) -> str:
    return method.rpartition("/")[0].strip("/")
