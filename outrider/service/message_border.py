"""The border of a server: a request message is looked at as bytes before it is parsed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError
from outrider.service.rpc_errors import abort_with

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""A grpc.RpcMethodHandler, which is generic in its stubs only."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class MessageBorder(grpc.aio.ServerInterceptor):
    """Unary requests that are too large or do not parse end with INVALID_ARGUMENT.

    gRPC parses on the event loop, where 16 MiB of empty submessages take seconds, and what
    its parser raises would be UNKNOWN. Messages of request streams are for their servicers
    (`rpc_errors`): their senders are nodes and routers.
    """

    def __init__(self, *, max_request_bytes: int) -> None:
        self._max_request_bytes = max_request_bytes

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = functools.partial(self._read, handler.request_deserializer)
        make, behaviour = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
        )
        assert behaviour is not None, "a handler of this kind has a behaviour"
        return make(_guarded(behaviour), request_deserializer=read, response_serializer=handler.response_serializer)

    def _read(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        if len(data) > self._max_request_bytes:
            return InvalidRequestError(
                f"the request has {len(data)} bytes; at most {self._max_request_bytes} are allowed",
                field="",
                reason="REQUEST_TOO_LARGE",
            )
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequestError("the request does not parse: is a text not UTF-8?", field="")


def _guarded(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """The same behaviour for messages; for an error in place of one, its status."""

    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, InvalidRequestError):
            await abort_with(context, request)
        return await behaviour(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, InvalidRequestError):
            await abort_with(context, request)
        async for response in behaviour(request, context):
            yield response

    return stream if inspect.isasyncgenfunction(behaviour) else answer
