"""Who may call what between services: checked before a servicer hears of a call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from outrider.errors import NotAllowedError
from outrider.rpc.peer_security import PeerSecurity
from outrider.service.health import HEALTH_SERVICE
from outrider.service.node_service import SERVICE_NAME as NODE_SERVICE
from outrider.service.reflection import REFLECTION_SERVICES
from outrider.service.rpc_errors import abort_with

ROUTER_SERVICE = "outrider.v1.RouterService"
OPEN_SERVICES = frozenset({HEALTH_SERVICE, *REFLECTION_SERVICES, ROUTER_SERVICE})
"""For everybody who passes the handshake. A router asks its clients for tokens itself."""

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""A grpc.RpcMethodHandler, which is generic in its stubs only."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class PeerGate(grpc.aio.ServerInterceptor):
    """NodeService is for services of the cluster and operators, every other service for services of the cluster."""

    def __init__(self, security: PeerSecurity) -> None:
        self._security = security

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        service = details.method.rpartition("/")[0].strip("/")
        if handler is None or service in OPEN_SERVICES:
            return handler

        async def admit(context: Context) -> None:
            caller = context.auth_context()
            is_operator = service == NODE_SERVICE and self._security.is_operator(caller)
            if not is_operator and not self._security.is_peer(caller):
                await abort_with(context, NotAllowedError(self._security.explain_refusal(caller)))

        return _guarded(handler, admit)


def _guarded(handler: Handler, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def answer(request: Any, context: Context) -> Any:
        await admit(context)
        return await behaviour(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await admit(context)
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        stream if inspect.isasyncgenfunction(behaviour) else answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
