"""Server reflection, v1 and v1alpha, with which ghz and grpcurl work without `--proto`.

ghz looks up a method's symbol (`outrider.v1.RouterService.Generate`), which Python's
descriptor pool cannot find (grpc issue 34743), so `ReflectionPool` looks up the method's service instead.
grpcio-reflection has only v1alpha. v1 has the same messages in another package, so the bytes
on the wire are the same, and one servicer is registered under both names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from outrider.service.rpc_errors import Context, rpc_errors

V1ALPHA_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
V1_SERVICE = "grpc.reflection.v1.ServerReflection"
REFLECTION_SERVICES = (V1_SERVICE, V1ALPHA_SERVICE)
_V1_FILE = "grpc/reflection/v1/reflection.proto"
_METHOD = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves reflection for these full service names and for reflection itself."""
    names = (*service_names, *REFLECTION_SERVICES)
    servicer = ReflectionServicer(names, pool=ReflectionPool(descriptor_pool.Default()))

    async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async with rpc_errors(context):  # otherwise a malformed message would end as UNKNOWN, with a logged traceback
            async for response in servicer.ServerReflectionInfo(requests, context):  # type: ignore[attr-defined] # stub
                yield response

    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service_name in REFLECTION_SERVICES:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, {_METHOD: handler}),))


class ReflectionPool:
    """A descriptor pool that also finds the file of a method, and the file of reflection v1, which has no stub here."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool
        self._v1_pool = descriptor_pool.DescriptorPool()
        self._v1_pool.Add(_v1_file())

    def FindFileByName(self, file_name: str) -> FileDescriptor:  # noqa: N802 protobuf's name
        """Returns the file of this name. Raises: KeyError."""
        if file_name == _V1_FILE:
            return self._v1_pool.FindFileByName(file_name)
        return self._pool.FindFileByName(file_name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        """Returns the file that declares the symbol. Raises: KeyError."""
        pool = self._v1_pool if symbol.startswith("grpc.reflection.v1.") else self._pool
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service_name, _, method_name = symbol.rpartition(".")
            service = pool.FindServiceByName(service_name)
            if method_name not in service.methods_by_name:
                raise
            return service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    """Returns v1alpha's file under v1's package name."""
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    proto.name, proto.package = _V1_FILE, "grpc.reflection.v1"
    for message in proto.message_type:
        for item in (item for item in message.field if item.type_name):
            item.type_name = item.type_name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return proto
