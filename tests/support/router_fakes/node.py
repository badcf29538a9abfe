"""The base of fake nodes: a server, an identity, reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.request import Adapter
from outrider.service.node_service import NodeServicer
from outrider.v1 import node_pb2, node_pb2_grpc, router_pb2
from tests.support.adapters import ScriptedAdapters
from tests.support.router_fakes.model import fake_model_info, fake_tokenizer_files

Context = grpc.aio.ServicerContext[Any, Any]


class FakeNode:
    """A node's server and identity. `freeze` acts like SIGSTOP: connections stay open, but nothing answers."""

    def __init__(self, role: NodeRole, *, name: str, model: ModelInfo | None = None) -> None:
        self.role = role
        self.name = name
        self.model = model if model is not None else fake_model_info()
        self.tokenizer_files = fake_tokenizer_files()
        self.state = NodeState.SERVING
        self.incarnation = os.urandom(16)
        self.step = 0
        self.address = ""
        self.adapters = ScriptedAdapters()
        self.reported_adapters: tuple[Adapter, ...] | None = None  # None: those that it has
        self.knows_adapters = True  # False for nodes of a version before adapters
        self.sends_tokenizer = True  # False if it never answers a request for its tokenizer
        self._server: grpc.aio.Server | None = None
        self._moves = asyncio.Event()
        self._moves.set()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Starts the server, at its last address if it had one, and returns the address."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        node_pb2_grpc.add_NodeServiceServicer_to_server(_FakeNodeServicer(self), self._server)
        self.add_to(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address or address)}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Stops the server like kill -9, so that every stream breaks."""
        if self._server is not None:
            await self._server.stop(None)

    def freeze(self) -> None:
        self._moves.clear()

    def thaw(self) -> None:
        self._moves.set()

    async def moves(self) -> None:
        """Waits while the node is frozen."""
        await self._moves.wait()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the role's services, except for NodeService."""

    def info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self.incarnation,
            name=self.name,
            role=self.role,
            state=self.state,
            version="fake",
            model=self.model if self.state is not NodeState.STARTING else None,
        )

    def load(self) -> NodeLoad:
        return NodeLoad()

    def report(self) -> NodeReport:
        return NodeReport(
            state=self.state,
            incarnation=self.incarnation,
            mark=self.step,
            num_steps=self.step,
            load=self.load(),
            adapters=self.adapters.adapters if self.reported_adapters is None else self.reported_adapters,
        )


class _FakeNodeServicer(NodeServicer):
    def __init__(self, node: FakeNode) -> None:
        super().__init__(node.info, node.report, lambda: node.tokenizer_files, adapters=lambda: node.adapters)
        self._node = node

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> node_pb2.NodeInfo:
        await self._node.moves()
        return await super().GetNode(request, context)

    async def LoadAdapter(
        self, request: router_pb2.LoadAdapterRequest, context: Context
    ) -> router_pb2.LoadAdapterResponse:
        await self._may_change_adapters(context)
        return await super().LoadAdapter(request, context)

    async def UnloadAdapter(
        self, request: router_pb2.UnloadAdapterRequest, context: Context
    ) -> router_pb2.UnloadAdapterResponse:
        await self._may_change_adapters(context)
        return await super().UnloadAdapter(request, context)

    async def _may_change_adapters(self, context: Context) -> None:
        await self._node.moves()
        if not self._node.knows_adapters:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def GetTokenizer(
        self, request: node_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[node_pb2.TokenizerChunk]:
        if not self._node.sends_tokenizer:
            await asyncio.Event().wait()
        async for chunk in super().GetTokenizer(request, context):
            yield chunk

    async def Watch(self, request: node_pb2.WatchNodeRequest, context: Context) -> AsyncIterator[node_pb2.NodeReport]:
        async for report in super().Watch(request, context):
            await self._node.moves()
            yield report
