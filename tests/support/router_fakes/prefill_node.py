"""A prefill node that computes nothing and only claims to have pushed KV."""

from __future__ import annotations

import asyncio

import grpc

from outrider.errors import MismatchError
from outrider.node import ModelInfo, NodeLoad, NodeRole
from outrider.prefill import MAX_SCORED_ROWS
from outrider.service.rpc_errors import abort_with
from outrider.v1 import prefill_pb2, prefill_pb2_grpc
from outrider.wire.answer import pack_logprobs
from outrider.wire.prefill import CALL
from tests.support.router_fakes.decode_node import KV_BYTES_PER_TOKEN, fake_logprobs, find_decode_node
from tests.support.router_fakes.node import Context, FakeNode


class FakePrefillNode(FakeNode, prefill_pb2_grpc.PrefillServiceServicer):
    """Pushes to the fake decode nodes of its process."""

    def __init__(self, *, name: str = "prefill-0", model: ModelInfo | None = None) -> None:
        super().__init__(NodeRole.PREFILL, name=name, model=model)
        self.prefill_seconds = 0.0
        self.num_cached_tokens = 0
        self.max_answered_logprobs: int | None = None  # maximum number of tokens; None: all that were requested
        self.repeats_logprobs = 1  # how many times the logprobs are sent
        self.answer_gate: asyncio.Event | None = None  # pushes are answered once it is set
        self.times = prefill_pb2.PrefillResponse()  # the times that it reports for the parts of a call
        self.fails_with: grpc.StatusCode | None = None
        self.pushes = True  # False if it answers without pushing anything
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.traceparents: list[str] = []  # those of calls that have one
        self.num_active = 0
        self.num_outstanding_tokens = 0
        self.max_rows_per_step = 0  # 0 if it does not report it
        self.max_outstanding_tokens = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def load(self) -> NodeLoad:
        return NodeLoad(
            num_running=self.num_active,
            num_outstanding_tokens=self.num_outstanding_tokens,
            max_rows_per_step=self.max_rows_per_step,
        )

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:
        self.requests.append(request)
        metadata = context.invocation_metadata() or ()
        self.traceparents += [str(value) for key, value in metadata if key == "traceparent"]
        num_tokens = len(request.token_ids)
        num_outstanding = min(num_tokens, MAX_SCORED_ROWS) if request.scored_token_ids else num_tokens
        self.num_active += 1
        self.num_outstanding_tokens += num_outstanding
        self.max_outstanding_tokens = max(self.max_outstanding_tokens, self.num_outstanding_tokens)
        try:
            await self.moves()
            await asyncio.sleep(self.prefill_seconds)
            await self.moves()
            if self.fails_with is not None:
                await context.abort(self.fails_with, "scripted failure")
            adapter = CALL.from_proto(request).options.adapter
            if adapter is not None and self.adapters.find(adapter) is None:
                await abort_with(context, MismatchError(f"no adapter {adapter}", reason="NO_ADAPTER"))
            if self.pushes:
                self._push(request)
            if self.answer_gate is not None:
                await self.answer_gate.wait()
                await self.moves()
                if self.fails_with is not None:
                    await context.abort(self.fails_with, "scripted failure")
        finally:
            self.num_active -= 1
            self.num_outstanding_tokens -= num_outstanding
        num_cached = min(self.num_cached_tokens, num_tokens)
        response = prefill_pb2.PrefillResponse(
            num_cached_tokens=num_cached,
            num_computed_tokens=num_tokens - num_cached,
            compute_microseconds=round(self.prefill_seconds * 1e6) + 1000,
            connector="fake",
            kv_bytes=(num_tokens - request.held_prefix_length) * KV_BYTES_PER_TOKEN,
            transfer_microseconds=2000,
            exposed_microseconds=500,
            prompt_logprobs=self._logprobs(request),
        )
        response.MergeFrom(self.times)
        return response

    def _logprobs(self, request: prefill_pb2.PrefillRequest) -> bytes:
        wanted = request.scored_token_ids[: self.max_answered_logprobs]
        return pack_logprobs(fake_logprobs(wanted, request.options.prompt_logprobs)) * self.repeats_logprobs

    def _push(self, request: prefill_pb2.PrefillRequest) -> None:
        node = find_decode_node(request.kv_address)
        if node is not None and node.incarnation == request.decode_incarnation:
            node.complete_transfer(request.transfer_id, len(request.token_ids) - request.held_prefix_length)
