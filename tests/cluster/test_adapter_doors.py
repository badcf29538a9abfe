"""The doors of adapters, between stand-ins for two routers and for the gateway; tests/e2e has the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from outrider.cluster import adapter_doors
from outrider.cluster.adapter_doors import AdapterDoors
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.support.traces import TRACEPARENT
from tests.support.waiting import until, within

KEY = "control"


class FakeRouter(router_pb2_grpc.RouterServiceServicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, *names):
        self.names = names
        self.metadata = []
        self.num_ended = 0
        self.address = ""

    async def GetModel(self, request, context):
        return router_pb2.GetModelResponse(adapters=[router_pb2.Adapter(name=name) for name in self.names])

    async def HealthCheck(self, request, context):
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message=self.address)

    async def Generate(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        if request.text == "fail":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("why", "full"),))
        try:
            for token_id in (1, 2):
                chunk = vllm_engine_pb2.GenerateStreamChunk(token_ids=[token_id])
                yield vllm_engine_pb2.GenerateResponse(chunk=chunk)
            if request.text == "forever":
                await asyncio.Event().wait()
        finally:
            self.num_ended += 1


class FakeGateway(http.server.ThreadingHTTPServer):
    """Keeps a list of workers, and a tokenizer for each model that ever had one.

    Refuses the first two additions: one is in progress, and one is invalid. `broken`: answers instead of these, by
    method.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeGatewayHandler)
        self.workers = {}
        self.tokenizers = {"model": "id-of-model"}  # id by name
        self.num_refused = 0
        self.broken = {}  # method: status and body
        self.num_broken = 0

    @property
    def models(self):
        return sorted(worker["models"][0]["id"] for worker in self.workers.values())

    def urls(self, model):
        return [worker["url"] for worker in self.workers.values() if worker["models"] == [{"id": model}]]


class FakeGatewayHandler(http.server.BaseHTTPRequestHandler):
    def _answer(self, status, message):
        self._send(status, json.dumps(message).encode())

    def _send(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def parse_request(self):
        is_valid = super().parse_request()
        if is_valid and self.command in self.server.broken:
            self._send(*self.server.broken[self.command])
            self.server.num_broken += 1
            return False
        return is_valid

    def do_GET(self):
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        if self.path == "/v1/tokenizers":
            listed = [{"id": id_, "name": name} for name, id_ in self.server.tokenizers.items()]
            self._answer(200, {"tokenizers": listed})
            return
        listed = [
            {"id": name, "model_id": worker["models"][0]["id"], **worker}
            for name, worker in self.server.workers.items()
        ]
        self._answer(200, {"workers": listed})

    def do_POST(self):
        worker = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.num_refused < 2:
            self._answer((409, 400)[self.server.num_refused], {})
            self.server.num_refused += 1
            return
        self.server.workers[f"id-{len(self.server.workers)}-{worker['url'].rpartition(':')[2]}"] = worker
        model = worker["models"][0]["id"]
        self.server.tokenizers.setdefault(model, f"id of {model}".replace(" ", "-"))
        self._answer(202, {})

    def do_DELETE(self):
        kind, _, id_ = self.path.rpartition("/")
        if kind == "/v1/tokenizers":
            (name,) = (name for name, known in self.server.tokenizers.items() if known == id_)
            del self.server.tokenizers[name]
        else:
            del self.server.workers[id_]
        self._answer(202, {})

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway():
    with FakeGateway() as gateway:
        threading.Thread(target=gateway.serve_forever, args=(0.01,), daemon=True).start()
        yield gateway
        gateway.shutdown()


@pytest.fixture
async def routers(gateway, monkeypatch):
    """Two routers, whose adapters are shown to the gateway."""
    monkeypatch.setattr(adapter_doors, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(adapter_doors, "CLOSE_SECONDS", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        routers = [FakeRouter("sql", "law", "unknown"), FakeRouter("sql", "é ")]
        for router in routers:
            server = grpc.aio.server()
            router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(router, server)
            router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        doors = AdapterDoors([router.address for router in routers], f"http://127.0.0.1:{gateway.server_port}", KEY)
        task = asyncio.create_task(doors.run())
        await until(lambda: len(gateway.workers) == 4)
        yield routers
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def engine_at(url):
    async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def test_each_adapter_of_each_router_has_a_door(gateway, routers):
    assert gateway.models == ["law", "sql", "sql", "é "]
    for router, name in ((routers[0], "law"), (routers[1], "é ")):
        (url,) = gateway.urls(name)
        async with engine_at(url) as engine:
            health = await within(engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest()))
            assert health.message == router.address
            call = engine.Generate(vllm_engine_pb2.GenerateRequest(), metadata=(("traceparent", TRACEPARENT),))
            assert [list(message.chunk.token_ids) async for message in call] == [[1], [2]]
        assert router.metadata[-1]["model-bin"].decode() == name
        assert router.metadata[-1]["traceparent"] == TRACEPARENT
    reached = set()
    for url in gateway.urls("sql"):
        async with engine_at(url) as engine:
            reached.add((await within(engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest()))).message)
    assert reached == {router.address for router in routers}


async def test_a_door_passes_on_errors_and_cancellations_and_no_other_service(gateway, routers):
    (url,) = gateway.urls("law")
    async with engine_at(url) as engine:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [message async for message in engine.Generate(vllm_engine_pb2.GenerateRequest(text="fail"))]
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert ("why", "full") in tuple(raised.value.trailing_metadata())
        call = engine.Generate(vllm_engine_pb2.GenerateRequest(text="forever"))
        await within(call.read())
        call.cancel()
        await until(lambda: routers[0].num_ended == 1)
    async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await router_pb2_grpc.RouterServiceStub(channel).GetModel(router_pb2.GetModelRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unloaded_adapter_is_not_shown_and_its_answers_end(gateway, routers):
    (url,) = gateway.urls("law")
    async with engine_at(url) as engine:
        call = engine.Generate(vllm_engine_pb2.GenerateRequest(text="forever"))
        await within(call.read())
        routers[0].names = ("sql", "tax")
        await until(lambda: gateway.models == ["sql", "sql", "tax", "é "])

        async def is_closed():
            try:
                async with engine_at(url) as other:
                    await other.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return True
            return False

        async with asyncio.timeout(60):
            while not await is_closed():
                pass
        assert list((await within(call.read())).chunk.token_ids) == [2]
        assert not call.done()


@pytest.mark.parametrize("answer", [(200, b""), (200, b"[]"), (200, b"{}"), (500, b"")])
async def test_no_answer_of_the_gateway_ends_the_doors(gateway, routers, answer):
    gateway.broken = {"GET": answer}
    routers[0].names = ("sql", "tax")
    await until(lambda: gateway.num_broken > 2)
    gateway.broken = {}
    await until(lambda: gateway.models == ["sql", "sql", "tax", "é "])


async def test_an_engine_that_cannot_be_removed_holds_up_no_other(gateway, routers):
    gateway.broken = {"DELETE": (409, b"{}")}
    routers[0].names = ("sql", "tax")
    await until(lambda: gateway.num_broken > 2 and "tax" in gateway.models)
    assert "law" in gateway.models
    gateway.broken = {}
    await until(lambda: gateway.models == ["sql", "sql", "tax", "é "])


async def test_a_door_that_cannot_be_opened_is_tried_again(gateway, routers, monkeypatch):
    refused = []

    def bind(port):
        refused.append(port)
        raise RuntimeError("no port is free")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_doors, "host_port", lambda *_: bind(0))
        routers[0].names, routers[1].names = ("sql", "law", "tax"), ("é ",)
        await until(lambda: len(refused) > 2 and gateway.models == ["law", "sql", "é "])
    await until(lambda: gateway.models == ["law", "sql", "tax", "é "])


async def test_the_tokenizers_of_unused_names_are_freed(gateway, routers):
    routers[0].names = ("tax",)
    await until(lambda: set(gateway.tokenizers) == {"model", "sql", "tax", "é "})
    gateway.tokenizers["law"] = "late"  # a tokenizer that was still being loaded when its engine was removed
    await until(lambda: "law" not in gateway.tokenizers)
    assert gateway.models == ["sql", "tax", "é "]
