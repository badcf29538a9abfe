"""Outrider's public service. Converts protos to calls of `RequestRegistry`, and answers to protos."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from outrider.answer import AnswerEvent
from outrider.errors import CapacityError, InvalidRequestError, PeerLostError
from outrider.rpc.channels import DEFAULT_MAX_MESSAGE_BYTES
from outrider.service.rpc_errors import Context, rpc_errors
from outrider.v1 import router_pb2, router_pb2_grpc
from outrider.wire.adapter import ADAPTER
from outrider.wire.answer import CompleteResponseBuilder, event_to_proto
from outrider.wire.cluster import CLUSTER, MODEL
from outrider.wire.request import num_samples, skips_special_tokens
from router.api.clients import host_of_peer
from router.api.registry import RequestRegistry
from router.api.request_parsing import MAX_SAMPLES, check_chat, check_detokenize, check_request_id, encode_prompt

SERVICE_NAME = "outrider.v1.RouterService"
DEFAULT_WATCH_SECONDS = 1.0
MIN_WATCH_SECONDS = 0.1
MAX_WATCHES = 128
"""Maximum concurrent WatchCluster calls. Each gets a message about all nodes up to ten times a second."""
MAX_WATCHES_PER_CLIENT = 32
"""Maximum concurrent WatchCluster calls per client, which is a token's name or, without tokens, an address."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, requests: RequestRegistry) -> None:
        self._requests = requests
        self._has_ended = asyncio.Event()  # set when the router stops
        self._watches: Counter[str] = Counter()  # by client

    def end_watches(self) -> None:
        """Ends every WatchCluster call with a status that gives the reason."""
        self._has_ended.set()

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        async with rpc_errors(context), self._requests.open(request, context) as live:
            await live.write(context.write, event_to_proto)

    async def Complete(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> router_pb2.CompleteResponse:
        async with rpc_errors(context), self._requests.open(request, context) as live:
            builder = CompleteResponseBuilder(num_samples(request.sampling))

            async def add(event: AnswerEvent) -> None:
                builder.add(event)
                if builder.num_bytes > DEFAULT_MAX_MESSAGE_BYTES:  # computing the rest would be in vain
                    raise InvalidRequestError(
                        f"the answer exceeds the message limit of {DEFAULT_MAX_MESSAGE_BYTES} bytes; use Generate, "
                        "which streams",
                        field="sampling.max_tokens",
                        reason="ANSWER_TOO_LARGE",
                    )

            await live.write(add, lambda event: event)
            return builder.build()

    async def Resume(self, request: router_pb2.ResumeRequest, context: Context) -> None:  # noqa: N802
        async with rpc_errors(context):
            check_request_id(request.request_id)
            if len(request.next_positions) > MAX_SAMPLES:
                raise InvalidRequestError(
                    f"next_positions must have at most {MAX_SAMPLES} entries", field="next_positions"
                )
            next_positions = dict(request.next_positions)
            async with self._requests.find(request.request_id, next_positions, context) as live:
                await live.write(context.write, event_to_proto, next_positions)

    async def Abort(self, request: router_pb2.AbortRequest, context: Context) -> router_pb2.AbortResponse:  # noqa: N802
        async with rpc_errors(context):
            return router_pb2.AbortResponse(aborted=await self._requests.abort(request.request_id, context))

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:  # noqa: N802
        async with rpc_errors(context):
            caller = self._requests.charge(context)
            kind = request.WhichOneof("input")
            if kind is None:
                raise InvalidRequestError("an input is required: text or chat", field="input")
            served = self._requests.served()
            if kind == "chat":
                check_chat(request.chat, served.info)
            token_ids, _ = await encode_prompt(request, served, client=caller.share)
            return router_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: router_pb2.DetokenizeRequest, context: Context
    ) -> router_pb2.DetokenizeResponse:
        async with rpc_errors(context):
            caller = self._requests.charge(context)
            served = self._requests.served()
            check_detokenize(request, served.info)
            text = await served.tokenizer.decode(
                request.token_ids, skip_special_tokens=skips_special_tokens(request), client=caller.share
            )
            return router_pb2.DetokenizeResponse(text=text)

    async def GetModel(self, request: router_pb2.GetModelRequest, context: Context) -> router_pb2.GetModelResponse:  # noqa: N802
        async with rpc_errors(context):
            return MODEL.to_proto(self._requests.model())

    async def LoadAdapter(  # noqa: N802
        self, request: router_pb2.LoadAdapterRequest, context: Context
    ) -> router_pb2.LoadAdapterResponse:
        async with rpc_errors(context):
            self._requests.charge(context).check_adapters()
            adapter = await self._requests.adapters.load(request.name, request.directory)
            return router_pb2.LoadAdapterResponse(adapter=ADAPTER.to_proto(adapter))

    async def UnloadAdapter(  # noqa: N802
        self, request: router_pb2.UnloadAdapterRequest, context: Context
    ) -> router_pb2.UnloadAdapterResponse:
        async with rpc_errors(context):
            self._requests.charge(context).check_adapters()
            await self._requests.adapters.unload(request.name)
            return router_pb2.UnloadAdapterResponse()

    async def WatchCluster(self, request: router_pb2.WatchClusterRequest, context: Context) -> None:  # noqa: N802
        async with rpc_errors(context), self._watch(context):
            interval = DEFAULT_WATCH_SECONDS
            if request.HasField("interval"):
                interval = max(request.interval.seconds + request.interval.nanos / 1e9, MIN_WATCH_SECONDS)
            while not self._has_ended.is_set():
                await context.write(CLUSTER.to_proto(self._requests.cluster_status()))
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await self._has_ended.wait()
            raise PeerLostError("the router is stopping", reason="DRAINING")

    @asynccontextmanager
    async def _watch(self, context: Context) -> AsyncIterator[None]:
        """Counts a watch during the block. Raises: CapacityError above `MAX_WATCHES` or `MAX_WATCHES_PER_CLIENT`."""
        client = self._requests.identify(context).name or host_of_peer(context.peer())
        if self._watches.total() >= MAX_WATCHES:
            raise CapacityError(f"limit of {MAX_WATCHES} WatchCluster calls reached", reason="TOO_MANY_WATCHES")
        if self._watches[client] >= MAX_WATCHES_PER_CLIENT:
            message = f"limit of {MAX_WATCHES_PER_CLIENT} WatchCluster calls per client reached"
            raise CapacityError(message, reason="TOO_MANY_WATCHES")
        self._watches[client] += 1
        try:
            yield
        finally:
            self._watches[client] -= 1
            self._watches += Counter()  # removes clients without watches
