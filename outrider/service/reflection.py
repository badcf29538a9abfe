"""Server reflection (v1alpha) that ghz and grpcurl can use without `--proto`.

ghz asks for a method's symbol (`outrider.v1.RouterService.Generate`), which Python's
descriptor pool cannot find (grpc issue 34743): the pool here falls back to the service.
grpcio-reflection has no v1: clients that try it first go on with v1alpha, since v1 is UNIMPLEMENTED here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from outrider.service.rpc_errors import Context, rpc_errors

REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves reflection for these full service names, and for itself."""
    servicer = ReflectionServicer((*service_names, REFLECTION_SERVICE), pool=ReflectionPool(descriptor_pool.Default()))

    async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async with rpc_errors(context):  # a message that does not parse would be UNKNOWN, and a trace in the log
            async for response in servicer.ServerReflectionInfo(requests, context):  # type: ignore[attr-defined] # stub
                yield response

    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_SERVICE, methods),))


class ReflectionPool:
    """A descriptor pool that also finds a method's file."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 protobuf's name
        """Raises: KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service_name, _, method_name = symbol.rpartition(".")
            service = self._pool.FindServiceByName(service_name)
            if method_name not in service.methods_by_name:
                raise
            return service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
