"""Serves the NodeService, which every role has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from outrider.errors import NotFoundError, NotSupportedError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeState
from outrider.request import Adapter
from outrider.service.profiling import ProfileDesk
from outrider.service.rpc_errors import Context, abort_with, rpc_errors
from outrider.v1 import node_pb2, node_pb2_grpc, router_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.node import ReportWriter, info_to_proto
from outrider.wire.profile import PROFILE, options_from_proto

SERVICE_NAME = "outrider.v1.NodeService"
TOKENIZER_CHUNK_BYTES = 1 << 20
TRACE_CHUNK_BYTES = 1 << 20
DEFAULT_INTERVAL_SECONDS = 0.2
MIN_INTERVAL_SECONDS = 0.05


def default_node_name(role: str, address: str, *, configured: str = "") -> str:
    """Returns the configured name, or else e.g. "decode@127.0.0.1:50052". `address` is the reachable address."""
    return configured or f"{role.removesuffix('_node')}@{address}"


class AdapterDesk(Protocol):
    """A node's adapters (`outrider.model_hub.adapters.AdapterTable`). Loading blocks, and any thread may do it."""

    @property
    def adapters(self) -> tuple[Adapter, ...]: ...

    def load(self, name: str, directory: str, fingerprint: str, has_ended: Callable[[], bool]) -> Adapter:
        """Loads nothing once `has_ended` returns True. Raises: OutriderError."""

    def unload(self, name: str, fingerprint: str) -> None:
        """Raises: OutriderError."""


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Answers calls with the results of callables, which run on the event loop and must not block."""

    def __init__(
        self,
        info: Callable[[], NodeInfo],
        report: Callable[[], NodeReport],
        tokenizer_files: Callable[[], Mapping[str, bytes] | None] = lambda: None,
        profiles: ProfileDesk | None = None,
        adapters: Callable[[], AdapterDesk | None] | None = None,
    ) -> None:
        """`adapters`: returns None while the model loads."""
        self._info = info
        self._report = report
        self._tokenizer_files = tokenizer_files
        self._profiles = profiles
        self._adapters = adapters
        self._loading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")  # each load takes memory

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> node_pb2.NodeInfo:  # noqa: N802 the proto's name
        return info_to_proto(self._info())

    async def GetTokenizer(  # noqa: N802
        self, request: node_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[node_pb2.TokenizerChunk]:
        files = self._tokenizer_files()
        if not files:
            await abort_with(context, NotFoundError("this node has no tokenizer", reason="NO_TOKENIZER"))
        for name, data in files.items():
            for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
                yield node_pb2.TokenizerChunk(file_name=name, data=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchNodeRequest, context: Context
    ) -> AsyncIterator[node_pb2.NodeReport]:
        interval = request.interval_milliseconds / 1000 or DEFAULT_INTERVAL_SECONDS
        interval = max(interval, MIN_INTERVAL_SECONDS)
        to_proto = ReportWriter().to_proto
        while True:
            yield to_proto(self._report())
            await asyncio.sleep(interval)

    async def Profile(  # noqa: N802
        self, request: node_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[node_pb2.ProfileChunk]:
        async with rpc_errors(context):
            options = options_from_proto(request)
            if self._info().state is not NodeState.SERVING:
                raise PeerLostError(f"{self._info().name} does not serve", node=self._info().name, reason="NOT_SERVING")
            if self._profiles is None:
                raise NotSupportedError("this node has no engine whose steps could be profiled", reason="NO_ENGINE")
            profile, trace = await self._profiles.run(options)
        yield node_pb2.ProfileChunk(summary=PROFILE.to_proto(profile))
        for start in range(0, len(trace), TRACE_CHUNK_BYTES):
            yield node_pb2.ProfileChunk(trace=trace[start : start + TRACE_CHUNK_BYTES])

    async def LoadAdapter(  # noqa: N802
        self, request: router_pb2.LoadAdapterRequest, context: Context
    ) -> router_pb2.LoadAdapterResponse:
        async with rpc_errors(context):
            has_ended = threading.Event()  # a call that is cancelled, or whose deadline passes, loads nothing
            load = partial(self._desk().load, request.name, request.directory, request.fingerprint, has_ended.is_set)
            try:
                adapter = await asyncio.get_running_loop().run_in_executor(self._loading, load)
            finally:
                has_ended.set()
            return router_pb2.LoadAdapterResponse(adapter=ADAPTER.to_proto(adapter))

    async def UnloadAdapter(  # noqa: N802
        self, request: router_pb2.UnloadAdapterRequest, context: Context
    ) -> router_pb2.UnloadAdapterResponse:
        async with rpc_errors(context):
            await asyncio.to_thread(self._desk().unload, request.name, request.fingerprint)
            return router_pb2.UnloadAdapterResponse()

    def _desk(self) -> AdapterDesk:
        """Returns the adapters. Raises: NotSupportedError on nodes that have none; PeerLostError while loading."""
        if self._adapters is None:
            raise NotSupportedError("this node does not compute the model, so it has no adapters", reason="NO_ENGINE")
        desk = self._adapters()
        if desk is None:
            raise PeerLostError(f"{self._info().name} does not serve", node=self._info().name, reason="NOT_SERVING")
        return desk
