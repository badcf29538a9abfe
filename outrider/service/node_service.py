"""NodeService for every role, and its watcher."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from outrider.errors import NotFoundError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeState
from outrider.rpc.status import from_rpc_error
from outrider.service.liveness import DEFAULT_GRACE_SECONDS, ProgressDeadline, until_lost
from outrider.service.profiling import NoProfiles, ProfileDesk
from outrider.service.rpc_errors import abort_with, rpc_errors
from outrider.v1 import node_pb2, node_pb2_grpc
from outrider.wire.node import info_from_proto, info_to_proto, report_from_proto, report_to_proto
from outrider.wire.profile import options_from_proto, profile_to_proto

SERVICE_NAME = "outrider.v1.NodeService"
TOKENIZER_CHUNK_BYTES = 1 << 20
TRACE_CHUNK_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 256 << 20
DEFAULT_INTERVAL_SECONDS = 0.2
LEAST_INTERVAL_SECONDS = 0.05
NO_ENGINE = NoProfiles("this node has no engine whose steps could be profiled", reason="NO_ENGINE")


def make_incarnation() -> bytes:
    """16 random bytes that name one run of one process."""
    return os.urandom(16)


def default_node_name(role: str, address: str, *, configured: str = "") -> str:
    """The configured name, else "decode@127.0.0.1:50052"; `address` is the one that others know."""
    return configured or f"{role.removesuffix('_node')}@{address}"


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Answers from callables, which are called on the event loop and must not block."""

    def __init__(
        self,
        info: Callable[[], NodeInfo],
        report: Callable[[], NodeReport],
        tokenizer_files: Callable[[], Mapping[str, bytes] | None] = lambda: None,
        profiles: ProfileDesk | NoProfiles = NO_ENGINE,
    ) -> None:
        self._info = info
        self._report = report
        self._tokenizer_files = tokenizer_files
        self._profiles = profiles

    async def GetNode(  # noqa: N802 the proto's name
        self,
        request: node_pb2.GetNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> node_pb2.NodeInfo:
        return info_to_proto(self._info())

    async def GetTokenizer(  # noqa: N802
        self,
        request: node_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[node_pb2.TokenizerChunk]:
        files = self._tokenizer_files()
        if not files:
            await abort_with(context, NotFoundError("this node has no tokenizer", reason="NO_TOKENIZER"))
        for name, data in files.items():
            for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
                yield node_pb2.TokenizerChunk(file_name=name, data=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def Watch(  # noqa: N802
        self,
        request: node_pb2.WatchNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[node_pb2.NodeReport]:
        interval = request.interval_milliseconds / 1000 or DEFAULT_INTERVAL_SECONDS
        interval = max(interval, LEAST_INTERVAL_SECONDS)
        while True:
            yield report_to_proto(self._report())
            await asyncio.sleep(interval)

    async def Profile(  # noqa: N802
        self,
        request: node_pb2.ProfileRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[node_pb2.ProfileChunk]:
        async with rpc_errors(context):
            options = options_from_proto(request)
            if self._info().state is not NodeState.SERVING:
                raise PeerLostError(f"{self._info().name} does not serve", node=self._info().name, reason="NOT_SERVING")
            profile, trace = await self._profiles.run(options)
        yield node_pb2.ProfileChunk(summary=profile_to_proto(profile))
        for start in range(0, len(trace), TRACE_CHUNK_BYTES):
            yield node_pb2.ProfileChunk(trace=trace[start : start + TRACE_CHUNK_BYTES])


class NodeWatcher:
    """One node's client: identity, tokenizer, and a stream of reports that ends with its loss.

    Raises nothing but OutriderErrors: PeerLostError when the stream breaks, when progress
    stops, or when another process answers in the node's place.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        target: str,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = node_pb2_grpc.NodeServiceStub(channel)
        self._target = target
        self._interval_seconds = interval_seconds
        self._grace_seconds = grace_seconds
        self._clock = clock

    async def get_node(self, *, timeout_seconds: float = 5.0) -> NodeInfo:
        try:
            return info_from_proto(await self._stub.GetNode(node_pb2.GetNodeRequest(), timeout=timeout_seconds))
        except grpc.RpcError as error:
            raise self._lost(error) from error
        except ValueError as error:
            raise PeerLostError(f"{self._target}: {error}", node=self._target) from error

    async def get_tokenizer(self, *, timeout_seconds: float = 60.0) -> dict[str, bytes]:
        """The tokenizer's files by name. Raises: NotFoundError on a node without one."""
        files: dict[str, bytearray] = {}
        num_bytes = 0
        call = self._stub.GetTokenizer(node_pb2.GetTokenizerRequest(), timeout=timeout_seconds)
        try:
            async for chunk in call:
                num_bytes += len(chunk.data)
                if num_bytes > MAX_TOKENIZER_BYTES:
                    raise PeerLostError(f"{self._target} sends a tokenizer without end", node=self._target)
                files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
        except grpc.RpcError as error:
            raise self._lost(error) from error
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def reports(self, *, incarnation: bytes | None = None) -> AsyncGenerator[NodeReport, None]:
        """Reports until the node is lost. With `incarnation`: only that process's.

        Close the iterator (`aclose`) when leaving early: that cancels the call.
        """
        request = node_pb2.WatchNodeRequest(interval_milliseconds=round(self._interval_seconds * 1000))
        call = self._stub.Watch(request)
        deadline = ProgressDeadline(grace_seconds=self._grace_seconds, clock=self._clock)
        lost = asyncio.ensure_future(until_lost(deadline))
        try:
            while True:
                read = asyncio.ensure_future(call.read())
                try:
                    await asyncio.wait((read, lost), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not read.done():
                        read.cancel()
                if not read.done() or read.cancelled():
                    raise PeerLostError(f"{self._target} makes no progress", node=self._target)
                proto = read.result()
                if not isinstance(proto, node_pb2.NodeReport):  # grpc.aio.EOF
                    raise PeerLostError(f"{self._target} ended its reports", node=self._target)
                report = report_from_proto(proto)
                incarnation = report.incarnation if incarnation is None else incarnation
                if report.incarnation != incarnation:
                    raise PeerLostError(f"{self._target} was restarted", node=self._target)
                deadline.feed(report)
                if deadline.is_lost():
                    raise PeerLostError(f"{self._target} stands still in step {report.step}", node=self._target)
                yield report
        except grpc.RpcError as error:
            raise self._lost(error) from error
        except ValueError as error:
            raise PeerLostError(f"{self._target}: {error}", node=self._target) from error
        finally:
            lost.cancel()
            call.cancel()

    def _lost(self, error: grpc.RpcError) -> OutriderError:
        found = from_rpc_error(error, target=self._target)
        if isinstance(found, (NotFoundError, PeerLostError)):
            return found
        return PeerLostError(f"{self._target}: {found.message}", node=self._target, reason=found.reason)
