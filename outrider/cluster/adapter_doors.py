"""Shows the SMG gateway each adapter (LoRA) of each router as an engine of its own.

The gateway tells models apart by engine only: its requests to an engine name no model. So each adapter of each router
gets a port on loopback, the adapter's door, which the gateway is told to use as an engine of that name. Calls through a
door go on to the router, with the adapter's name in their metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from outrider.rpc.channels import open_channel, server_options
from outrider.service.address import host_port, loopback
from outrider.service.request_limits import ENGINE_MODEL_KEY, ENGINE_SERVICE
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import TRACEPARENT, TRACESTATE
from outrider.v1 import router_pb2, router_pb2_grpc

POLL_SECONDS = 1.0
CALL_SECONDS = 2.0
CLOSE_SECONDS = 10.0
"""Seconds for which the door of an unloaded adapter still takes requests, since the gateway may have chosen it."""
ANSWER_SECONDS = 3600.0
"""Seconds that answers through a closed door may take to end."""
WILDCARD = "unknown"
"""The gateway's name for any model. Requests for an adapter of this name would reach all others, so it has no door."""

_log = get_logger("gateway")


class AdapterDoors:
    """Owned by the event loop that runs `run`. Routers are plaintext and ask for no token, as for the gateway."""

    def __init__(self, targets: Sequence[str], gateway_url: str, control_key: str) -> None:
        """`targets`: the routers, host:port. `control_key`: a key that may add and remove the gateway's engines."""
        self._targets = targets
        self._gateway_url = gateway_url
        self._headers = {"Authorization": f"Bearer {control_key}", "Content-Type": "application/json"}
        self._doors: dict[tuple[str, str], tuple[grpc.aio.Server, str]] = {}  # by router and adapter: door, URL
        self._closed: set[tuple[str, str]] = set()  # (URL, adapter) of closed doors that the gateway may still use
        self._names: set[str] = set()  # of all adapters that ever had a door
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keeps a door for each adapter of each router, until it is cancelled. Each round repeats what failed."""
        channels = {target: open_channel(target, is_replaceable=True) for target in self._targets}
        while True:
            await asyncio.gather(*(self._follow(target, channel) for target, channel in channels.items()))
            if self._names:
                with _logging_errors("the gateway's engines cannot be read"):
                    await asyncio.to_thread(self._tell_gateway)
            await asyncio.sleep(POLL_SECONDS)

    async def _follow(self, target: str, channel: grpc.aio.Channel) -> None:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            model = await stub.GetModel(router_pb2.GetModelRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError:  # the gateway finds by itself that a router is lost, also behind its doors
            return
        names = {adapter.name for adapter in model.adapters} - {WILDCARD}
        shown = {name for router, name in self._doors if router == target}
        for name in sorted(names - shown):
            with _logging_errors("no door can be opened", router=target, adapter=name):
                self._doors[target, name] = await _open_door(channel, name)
                self._names.add(name)
        for name in shown - names:
            door, url = self._doors.pop((target, name))
            self._closed.add((url, name))
            task = asyncio.create_task(_close_door(door))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if names != shown:
            _log.info("adapters", router=target, adapters=sorted(names))

    def _tell_gateway(self) -> None:
        """Makes the gateway use the open doors, and no closed ones. Raises any error of reading its lists."""
        ids = {(worker["url"], worker["model_id"]): worker["id"] for worker in self._ask("GET", "/workers")["workers"]}
        open_doors = {(url, name) for (_, name), (_, url) in self._doors.items()}
        for url, name in (self._closed - open_doors) & ids.keys():
            with _logging_errors("an adapter's door cannot be removed from the gateway", adapter=name):
                self._ask("DELETE", f"/workers/{ids[url, name]}")
                self._closed.discard((url, name))
        for url, name in open_doors - ids.keys():
            with _logging_errors("an adapter cannot be added to the gateway", adapter=name):
                engine = {"url": url, "models": [{"id": name}], "health": {"drain_settle_secs": 0}}
                self._ask("POST", "/workers", engine)
        unused = self._names - {name for _, name in open_doors | ids.keys()}
        for tokenizer in self._ask("GET", "/v1/tokenizers")["tokenizers"] if unused else ():
            if tokenizer["name"] in unused:  # the gateway itself keeps the tokenizers of removed engines
                with _logging_errors("an adapter's tokenizer cannot be freed", adapter=tokenizer["name"]):
                    self._ask("DELETE", f"/v1/tokenizers/{tokenizer['id']}")

    def _ask(self, method: str, path: str, message: Mapping[str, Any] | None = None) -> Any:
        data = None if message is None else json.dumps(message).encode()
        request = urllib.request.Request(self._gateway_url + path, data, self._headers, method=method)  # noqa: S310 http
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=CALL_SECONDS) as answer:
            return json.load(answer)


@contextlib.contextmanager
def _logging_errors(event: str, **where: str) -> Iterator[None]:
    """Logs any error: if one ended the doors' loop, no adapter would be served until the gateway restarts."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 ports run out, and the gateway may answer anything
        if getattr(error, "code", None) != http.HTTPStatus.CONFLICT:  # the answer while the gateway changes the engine
            _log.warning(event, error=repr(error), **where)


async def _open_door(channel: grpc.aio.Channel, adapter: str) -> tuple[grpc.aio.Server, str]:
    door = grpc.aio.server(handlers=(_Handler(channel, adapter),), options=server_options())
    port = door.add_insecure_port(host_port(loopback(), 0))
    await door.start()
    return door, f"grpc://{host_port(loopback(), port)}"


async def _close_door(door: grpc.aio.Server) -> None:
    await asyncio.sleep(CLOSE_SECONDS)
    await door.stop(ANSWER_SECONDS)


class _Handler(grpc.GenericRpcHandler):
    """Passes calls of the engine service on to a router, without parsing messages."""

    def __init__(self, channel: grpc.aio.Channel, adapter: str) -> None:
        self._channel = channel
        self._adapter = adapter

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a call, or None for other services. It serves single answers like streams of one."""
        method = handler_call_details.method
        if not method.startswith(f"/{ENGINE_SERVICE}/"):
            return None
        return grpc.unary_stream_rpc_method_handler(partial(self._pass, self._channel.unary_stream(method)))

    async def _pass(
        self, start: Callable[..., Any], request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        trace = [pair for pair in context.invocation_metadata() or () if pair[0] in (TRACEPARENT, TRACESTATE)]
        metadata = (*trace, (ENGINE_MODEL_KEY, self._adapter.encode()))
        call = start(request, metadata=metadata, timeout=context.time_remaining())
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()
