"""The engine service is served if it can be imported, and reflection lists it."""

from __future__ import annotations

import sys

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as engine_pb2
from smg_grpc_proto import vllm_engine_pb2_grpc as engine_pb2_grpc

from outrider.service.reflection import add_reflection
from router.config import RouterConfig
from router.router import Router
from tests.router.conftest import read_rest, refused


async def reflected(router):
    server = grpc.aio.server()
    router.add_to(server)
    add_reflection(server, router.service_names)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = await read_rest(
            stub.ServerReflectionInfo([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        code = (await refused(engine_pb2_grpc.VllmEngineStub(channel).Embed(engine_pb2.EmbedRequest()))).code
    await server.stop(None)
    return {service.name for service in answer.list_services_response.service}, code


async def test_reflection_lists_it():
    names, _ = await reflected(Router(RouterConfig(decode_targets=("127.0.0.1:1",))))
    assert "vllm.grpc.engine.VllmEngine" in names


async def test_it_is_not_served_without_its_stubs(monkeypatch):
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    for module in ("servicer", "answer"):
        monkeypatch.delitem(sys.modules, f"router.api.vllm_engine.{module}", raising=False)
    names, code = await reflected(Router(RouterConfig(decode_targets=("127.0.0.1:1",))))
    assert "vllm.grpc.engine.VllmEngine" not in names
    assert code is grpc.StatusCode.UNIMPLEMENTED
