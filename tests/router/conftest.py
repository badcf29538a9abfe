"""A cluster of fake nodes, a router and a client, all in this process and connected by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import CollectorRegistry

from outrider.rpc.channels import open_channel
from outrider.service.config import ServerConfig
from outrider.service.server import make_server
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import router_pb2, router_pb2_grpc
from router.api.clients import TokenFile
from router.config import RouterConfig
from router.router import Router
from tests.support.memory_store import FlakyStore, MemoryRecords
from tests.support.router_fakes import FakeDecodeNode, FakeNode, FakePrefillNode

PATIENCE_SECONDS = 30.0
"""Timeout, in seconds, of waits that take milliseconds unless the machine is busy."""


async def eventually(condition: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS, what: str = "") -> None:
    """Waits until the condition holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what or condition}"
        await asyncio.sleep(0.005)


class Answer:
    """The messages of a whole stream, by sample."""

    def __init__(self, messages: list[router_pb2.GenerateResponse]) -> None:
        self.messages = messages
        kinds = [message.WhichOneof("event") for message in messages]
        assert kinds[0] == "started", kinds
        assert kinds[-1] == "summary", kinds
        assert kinds.count("started") == kinds.count("summary") == 1
        self.started = messages[0].started
        self.summary = messages[-1].summary
        self.request_id = messages[0].request_id
        self.deltas: dict[int, list[router_pb2.Delta]] = {}
        self.finished: dict[int, router_pb2.Finished] = {}
        for message in messages[1:-1]:
            if message.HasField("delta"):
                assert message.delta.sample not in self.finished, "nothing follows a sample's end"
                self.deltas.setdefault(message.delta.sample, []).append(message.delta)
            else:
                assert message.finished.sample not in self.finished, "one end for each sample"
                self.finished[message.finished.sample] = message.finished
        for deltas in self.deltas.values():
            position = deltas[0].start_position
            for delta in deltas:
                assert delta.start_position == position, "no gap, no overlap"
                position += len(delta.token_ids)

    def text(self, sample: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas.get(sample, []))

    def token_ids(self, sample: int = 0) -> list[int]:
        return [token_id for delta in self.deltas.get(sample, []) for token_id in delta.token_ids]


@dataclasses.dataclass
class Failure:
    """A gRPC status with its unpacked details."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    reason: str = ""
    retry_seconds: float | None = None


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    failure = Failure(error.code(), error.details() or "")
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    for detail in status.details:
        bad_request, info, retry = (
            error_details_pb2.BadRequest(),
            error_details_pb2.ErrorInfo(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(bad_request):
            failure.field = bad_request.field_violations[0].field
        elif detail.Unpack(info):
            assert info.domain == "outrider"
            failure.reason = info.reason
        elif detail.Unpack(retry):
            failure.retry_seconds = retry.retry_delay.ToMilliseconds() / 1000
    return failure


async def read_rest(call: Any) -> list[Any]:
    """Returns the remaining messages of a stream."""
    messages = []
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


async def refused(call: Any) -> Failure:
    """Returns the status with which a call fails, streamed or not."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_rest(call) if hasattr(call, "read") else call)
    return failure_of(caught.value)


def make_request(text: str | None = "a prompt", **fields: Any) -> router_pb2.GenerateRequest:
    """Makes a request from its own fields and those of its sampling parameters."""
    names = router_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    if sampling := {name: fields.pop(name) for name in tuple(fields) if name in names}:
        fields["sampling"] = router_pb2.SamplingParams(**{"seed": 0, "max_tokens": 8} | sampling)
    if "token_ids" in fields or "chat" in fields or text is None:
        return router_pb2.GenerateRequest(**fields)
    return router_pb2.GenerateRequest(text=text, **fields)


class Cluster:
    """A router with fake nodes. The nodes' attributes may be changed before and after `start`."""

    def __init__(self) -> None:
        self.decode = FakeDecodeNode()
        self.prefill = FakePrefillNode()
        self.nodes: list[FakeNode] = [self.decode, self.prefill]
        self.service: Router
        self.stub: router_pb2_grpc.RouterServiceStub
        self.stack = contextlib.AsyncExitStack()
        self.registry = CollectorRegistry()
        self.shows_text = False
        self.reasoning_parser = ""

    async def start(
        self,
        *,
        resolver: Any = None,
        store: Any = None,
        clients: TokenFile | None = None,
        tracer: Tracer = NO_TRACER,
        **config: Any,
    ) -> Cluster:
        for node in self.nodes:
            if not node.address:
                await node.start()
            self.stack.push_async_callback(node.stop)
        values: dict[str, Any] = {
            f"{role.lower()}_targets": tuple(node.address for node in self.nodes if node.role.name == role)
            for role in ("PREFILL", "DECODE", "DRAFT")
        }
        values["liveness_timeout_seconds"] = 1.0
        extra = {} if resolver is None else {"resolver": resolver}
        self.service = Router(
            RouterConfig(**values | config),
            registry=self.registry,
            clients=clients,
            store=store,
            shows_text=self.shows_text,
            tracer=tracer,
            reasoning_parser=self.reasoning_parser,
            **extra,
        )
        authenticate = None if clients is None else clients.identify
        self.server = server = make_server(ServerConfig(port=0), authenticate=authenticate, calls=self.service.calls)
        self.service.add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.stack.push_async_callback(server.stop, None)
        self.stack.push_async_callback(self.service.stop)
        self.address = f"127.0.0.1:{port}"
        self.channel = open_channel(self.address)
        self.stack.push_async_callback(self.channel.close)
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)
        return self

    async def serve(self, **config: Any) -> Cluster:
        await self.start(**config)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.service.start(self.address)
        return self

    eventually = staticmethod(eventually)
    failure_of = staticmethod(failure_of)
    request = staticmethod(make_request)

    @staticmethod
    def says(text: str | bytes) -> Callable[[Any, int], list[int]]:
        """Returns a script that generates this text, one byte per token, and ends."""
        data = text.encode() if isinstance(text, str) else text
        return lambda _opened, _sample: [*data, 256]

    @property
    def context(self) -> Any:
        assert self.service.context is not None
        return self.service.context

    async def generate(self, request: Any = None, **fields: Any) -> Answer:
        return Answer(await read_rest(self.stub.Generate(request if request is not None else make_request(**fields))))

    async def fail(self, request: Any = None, **fields: Any) -> Failure:
        """Returns the status with which a request fails."""
        request = request if request is not None else make_request(**fields)
        return await refused(self.stub.Generate(request, timeout=PATIENCE_SECONDS))

    def resumable(self, *, seconds: float = 30.0, **fields: Any) -> router_pb2.GenerateRequest:
        """Makes a request "r" with a resume window."""
        window = duration_pb2.Duration()
        window.FromMilliseconds(round(seconds * 1000))
        return make_request(**{"request_id": "r", "resume_window": window} | fields)

    def resume_call(self, next_positions: dict[int, int] | None = None) -> Any:
        request = router_pb2.ResumeRequest(request_id="r", next_positions=next_positions or {})
        return self.stub.Resume(request, timeout=PATIENCE_SECONDS)

    async def is_empty(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until nothing is left in the router and on the nodes."""
        await eventually(lambda: len(self.service.requests) == 0, seconds=seconds, what="running requests")
        await eventually(lambda: self.decode.num_blocks_used == 0, seconds=seconds, what="blocks on decode nodes")
        await eventually(lambda: self.prefill.num_active == 0, seconds=seconds, what="prefills")
        context = self.context
        # The id of a request becomes free before its tasks handle their cancellation.
        await eventually(lambda: context.queue.num_waiting == 0, seconds=seconds, what="queue")
        await eventually(lambda: context.placement.num_placed == 0, seconds=seconds, what="places")
        assert context.queue.num_waiting_tokens == 0
        assert context.answers.reserved_bytes == 0
        for link in self.service.nodes.decode_nodes:
            assert link.session is not None
            assert not link.session._listeners
        for link in self.service.nodes.prefill_nodes:
            assert link.num_outstanding_tokens == 0
            assert not link._listeners


class NodePair(Cluster):
    """Two decode and two prefill nodes behind one router."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes = (self.decode, FakeDecodeNode(name="decode-1"))
        self.prefills = (self.prefill, FakePrefillNode(name="prefill-1"))
        self.use(self.decodes, self.prefills)
        self.pace(0.003)

    def use(self, decodes: Sequence[FakeDecodeNode], prefills: Sequence[FakePrefillNode]) -> None:
        """Replaces the nodes."""
        self.decodes, self.prefills = tuple(decodes), tuple(prefills)
        self.nodes = [*decodes, *prefills]

    async def serve(self, **config: Any) -> NodePair:
        await super().serve(**config)
        await eventually(lambda: len(self.service.nodes.decode_nodes) == len(self.decodes))
        await eventually(lambda: len(self.service.nodes.prefill_nodes) == len(self.prefills))
        return self

    def pace(self, step_seconds: float) -> None:
        for node in self.decodes:
            node.step_seconds = step_seconds

    def link_of(self, node: FakeNode) -> Any:
        """Returns the router's link to a serving node."""
        nodes = self.service.nodes
        return next(link for link in (*nodes.decode_nodes, *nodes.prefill_nodes) if link.name == node.name)

    @property
    def num_opened(self) -> int:
        return sum(len(node.opened) for node in self.decodes)

    def busy_and_free(self) -> tuple[FakeDecodeNode, FakeDecodeNode]:
        busy = next(node for node in self.decodes if node.groups)
        return busy, next(node for node in self.decodes if node is not busy)

    async def until_streaming(self, num_tokens: int = 20) -> None:
        await eventually(lambda: max(node.max_sent for node in self.decodes) > num_tokens)

    async def begin(
        self, num_tokens: int, **fields: Any
    ) -> tuple[asyncio.Task[Answer], FakeDecodeNode, FakeDecodeNode]:
        """Returns (the task of a long answer, the node that computes it, the other node)."""
        task = asyncio.ensure_future(self.generate(max_tokens=num_tokens, **fields))
        await self.until_streaming()
        return task, *self.busy_and_free()

    async def finish(self, task: asyncio.Task[Answer]) -> Answer:
        """Lets all nodes continue at full speed, and returns the answer."""
        self.pace(0.0)
        for node in self.decodes:
            node.thaw()
        return await asyncio.wait_for(task, PATIENCE_SECONDS)


class RouterPair:
    """Two routers with the same nodes and the same store."""

    num_tokens = 200

    def __init__(self) -> None:
        self.records = MemoryRecords()
        self.first, self.second = Cluster(), Cluster()
        self.second.decode, self.second.prefill = self.first.decode, self.first.prefill
        self.second.nodes = []
        self.stores = [
            FlakyStore(owner=owner, lease_seconds=PATIENCE_SECONDS, records=self.records)
            for owner in (b"first", b"second")
        ]

    async def serve(self, **config: Any) -> RouterPair:
        values = {"store_append_seconds": 0.05, "store_lease_seconds": 0.3} | config
        self.first.decode.step_seconds = 0.01
        await self.first.serve(store=self.stores[0], **values)
        targets = {
            "prefill_targets": (self.first.prefill.address,),
            "decode_targets": (self.first.decode.address,),
        }
        await self.second.serve(store=self.stores[1], **values, **targets)
        return self

    def request(self, **fields: Any) -> router_pb2.GenerateRequest:
        return self.first.resumable(**{"max_tokens": self.num_tokens} | fields)

    async def begin(self, num_deltas: int = 5, **fields: Any) -> tuple[Any, router_pb2.Started, list[router_pb2.Delta]]:
        """Returns (the call, Started, the first Deltas) on the first router."""
        call = self.first.stub.Generate(self.request(**fields))
        started = (await call.read()).started
        return call, started, [(await call.read()).delta for _ in range(num_deltas)]

    async def kill_first(self) -> None:
        """Ends the first router's server, sessions and writes to the store at once, as if it were killed."""
        keeper = self.first.service.requests.keeper
        keeper._work.cancel()
        await self.first.server.stop(None)
        await self.first.service.nodes.stop()

    async def resume(self, next_positions: dict[int, int] | None = None) -> list[router_pb2.GenerateResponse]:
        """Resumes the request on the second router."""
        return await read_rest(self.second.resume_call(next_positions))


def told(messages: list[router_pb2.GenerateResponse], sample: int = 0) -> list[int]:
    """Returns the token ids in one sample's Deltas."""
    deltas = [m.delta for m in messages if m.HasField("delta") and m.delta.sample == sample]
    return [token_id for delta in deltas for token_id in delta.token_ids]


@contextlib.asynccontextmanager
async def closing(*clusters: Cluster) -> AsyncIterator[None]:
    yield
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for cluster in clusters:
                await cluster.stack.aclose()
    except TimeoutError:
        for task in asyncio.all_tasks():
            task.print_stack()
        raise


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    async with closing(cluster):
        yield cluster


@pytest.fixture
async def node_pair() -> AsyncIterator[NodePair]:
    """A pair that does not serve yet."""
    pair = NodePair()
    async with closing(pair):
        yield pair


@pytest.fixture
async def router_pair() -> AsyncIterator[RouterPair]:
    """A pair that does not serve yet."""
    pair = RouterPair()
    async with closing(pair.second, pair.first):
        yield pair


@pytest.fixture
async def serving(cluster: Cluster) -> Cluster:
    return await cluster.serve()
