"""Strangers are refused before their messages are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import UnauthenticatedError
from outrider.service.peer_gate import ROUTER_SERVICE
from outrider.service.rpc_errors import abort_with
from router.clients import Clients

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""A grpc.RpcMethodHandler, which is generic in its stubs only."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class ClientGate(grpc.aio.ServerInterceptor):
    """RouterService is for clients that are known; health and reflection are for everybody."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        if handler is None or details.method.rpartition("/")[0].strip("/") != ROUTER_SERVICE:
            return handler
        try:
            self._clients.identify(details.invocation_metadata)
        except UnauthenticatedError as error:
            return _refusing(error, streams=handler.response_streaming)
        return handler


def _refusing(error: UnauthenticatedError, *, streams: bool) -> Handler:
    async def refuse(_request: bytes, context: Context) -> None:
        await abort_with(context, error)

    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(refuse)
