"""DecodeService: proto in, domain call, proto out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from decode_node.sessions import Sessions
from outrider.errors import PeerLostError
from outrider.service.rpc_errors import rpc_errors
from outrider.v1 import session_pb2, session_pb2_grpc


class DecodeServicer(session_pb2_grpc.DecodeServiceServicer):
    """`sessions` is None while the model loads: routers are told to come back."""

    def __init__(self) -> None:
        self.sessions: Sessions | None = None

    async def Session(  # noqa: N802 named by the proto
        self,
        request_iterator: AsyncIterator[session_pb2.SessionCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async with rpc_errors(context):
            if self.sessions is None:
                raise PeerLostError("the decode node is still loading its model", reason="STARTING")
            await self.sessions.serve(request_iterator, context.write)
