"""Serves the NodeService, which every role has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from outrider.errors import NotFoundError, NotSupportedError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeState
from outrider.service.profiling import ProfileDesk
from outrider.service.rpc_errors import Context, abort_with, rpc_errors
from outrider.v1 import node_pb2, node_pb2_grpc
from outrider.wire.node import REPORT, info_to_proto
from outrider.wire.profile import PROFILE, options_from_proto

SERVICE_NAME = "outrider.v1.NodeService"
TOKENIZER_CHUNK_BYTES = 1 << 20
TRACE_CHUNK_BYTES = 1 << 20
DEFAULT_INTERVAL_SECONDS = 0.2
MIN_INTERVAL_SECONDS = 0.05


def default_node_name(role: str, address: str, *, configured: str = "") -> str:
    """Returns the configured name, or else e.g. "decode@127.0.0.1:50052". `address` is the reachable address."""
    return configured or f"{role.removesuffix('_node')}@{address}"


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Answers calls with the results of callables, which run on the event loop and must not block."""

    def __init__(
        self,
        info: Callable[[], NodeInfo],
        report: Callable[[], NodeReport],
        tokenizer_files: Callable[[], Mapping[str, bytes] | None] = lambda: None,
        profiles: ProfileDesk | None = None,
    ) -> None:
        self._info = info
        self._report = report
        self._tokenizer_files = tokenizer_files
        self._profiles = profiles

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
        while True:
            yield REPORT.to_proto(self._report())
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
