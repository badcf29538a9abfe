"""The draft node's gRPC face: proto in, domain call, proto out."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from draft_node.config import DraftNodeConfig
from draft_node.draft_loop import DraftLimits, DraftLoop, DraftStepStats
from draft_node.draft_peer import DraftPeer
from outrider import __version__
from outrider.engine.engine_thread import EngineThread
from outrider.errors import InvalidRequestError, MismatchError, PeerLostError
from outrider.faults import fault_point
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.protocol_versions import SUPPORTED_VERSIONS, negotiate
from outrider.service.announce import announce_progress
from outrider.service.node_service import NodeServicer, default_node_name, make_incarnation
from outrider.service.rpc_errors import rpc_errors
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import EngineMetrics
from outrider.speculation.draft_stream import DraftHello
from outrider.speculation.proposers.base import Proposer
from outrider.speculation.proposers.factory import make_proposer
from outrider.v1 import draft_pb2, draft_pb2_grpc, node_pb2_grpc
from outrider.wire.draft import hello_from_proto, proposals_to_proto, update_from_proto
from outrider.wire.node import info_to_proto

EXIT_LOOP_FAILED = 70  # EX_SOFTWARE
LEAST_EXPECTED_STEP_SECONDS = 1.0
"""A step that follows a short one may have a long prefix to catch up with: that is not a death."""

DraftContext = grpc.aio.ServicerContext[draft_pb2.DraftUpdate, draft_pb2.DraftProposals]

_log = get_logger("draft_node")


class DraftNodeService:
    """A draft node as `run_service` runs it."""

    service_names: tuple[str, ...] = ("outrider.v1.DraftService", "outrider.v1.NodeService")

    def __init__(
        self,
        config: DraftNodeConfig,
        *,
        registry: CollectorRegistry,
        proposer: Proposer | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`exit_process` ends the process at once when the draft loop has failed."""
        self._config = config
        self._registry = registry
        self._proposer = proposer  # None: made in `start`
        self._exit_process = exit_process
        self._incarnation = make_incarnation()
        self._name = ""
        self._state = NodeState.STARTING
        self._loop: DraftLoop | None = None
        self._thread: EngineThread[DraftLoop] | None = None
        self._streams = DraftServicer(self)

    def add_to(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._streams, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(self.info, self.report), server)

    async def start(self, address: str) -> None:
        """Makes the proposer, in a thread, and starts the draft loop."""
        self._name = default_node_name("draft_node", address, configured=self._config.server.name)
        thread = self._thread = EngineThread(
            "draft loop",
            build=self._build,
            run=lambda loop: loop.run(),
            on_failure=self._loop_failed,
        )
        self._loop = await thread.build()
        self._state = NodeState.SERVING
        thread.run()

    async def drain(self, deadline_seconds: float) -> None:
        """Ends all streams at once: decode nodes go on without, nothing here is worth waiting for."""
        self._state = NodeState.DRAINING
        await self._streams.close(deadline_seconds)

    async def stop(self) -> None:
        self._state = NodeState.DRAINING
        if self._loop is not None and self._thread is not None:
            self._loop.stop()
            await asyncio.to_thread(self._thread.join, 5.0)

    def _build(self) -> DraftLoop:
        """In the draft loop's thread."""
        proposer = self._proposer
        if proposer is None:
            proposer = make_proposer(self._config.proposer, self._config.proposer_settings, progress=announce_progress)
            self._proposer = proposer
        limits = DraftLimits(
            num_speculative_tokens=self._config.num_speculative_tokens, max_sequences=self._config.max_sequences
        )
        metrics = EngineMetrics(model_name=proposer.name, registry=self._registry)
        return DraftLoop(proposer, limits, on_step=partial(_count_step, metrics))

    def _loop_failed(self, error: Exception) -> None:
        """A bug of ours: a node that drafts no more must not look alive."""
        _log.error("the draft loop failed; the process ends", error=str(error), exc_info=error)
        self._exit_process(EXIT_LOOP_FAILED)

    def describe(self) -> Mapping[str, Any]:
        return {
            "proposer": self._proposer.name if self._proposer is not None else self._config.proposer,
            "vocabulary_fingerprint": self._proposer.vocabulary_fingerprint if self._proposer is not None else "",
            "num_speculative_tokens": self._config.num_speculative_tokens,
            **(self._proposer.description if self._proposer is not None else {}),
        }

    def draft_loop(self) -> DraftLoop:
        """Raises: PeerLostError while starting and when draining: come again, or go elsewhere."""
        if self._loop is None or self._state is not NodeState.SERVING:
            raise PeerLostError(f"draft node {self._name} is {self._state.name.lower()}", node=self._name)
        return self._loop

    def info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self._incarnation,
            name=self._name,
            role=NodeRole.DRAFT,
            state=self._state,
            version=__version__,
            model=None if self._proposer is None else self._model_info(self._proposer),
        )

    def report(self) -> NodeReport:
        loop = self._loop
        if loop is None:
            return NodeReport(state=self._state, incarnation=self._incarnation)
        started = loop.step_started_at
        return NodeReport(
            state=self._state,
            incarnation=self._incarnation,
            step=loop.num_steps,
            expected_step_seconds=0.0 if started is None else max(loop.last_step_seconds, LEAST_EXPECTED_STEP_SECONDS),
            step_age_seconds=0.0 if started is None else max(0.0, time.monotonic() - started),
            load=loop.load(),
        )

    def check_fits(self, hello: DraftHello) -> None:
        """Raises: MismatchError that names both sides."""
        negotiate(
            SUPPORTED_VERSIONS,
            hello.protocol_versions,
            us=f"draft node {self._name}",
            them=f"decode node {hello.name}",
        )
        ours = self._proposer.vocabulary_fingerprint if self._proposer is not None else ""
        if ours and ours != hello.vocabulary_fingerprint:
            raise MismatchError(
                f"decode node {hello.name} has vocabulary {hello.vocabulary_fingerprint[:16]}, "
                f"draft node {self._name} has vocabulary {ours[:16]}",
                reason="VOCABULARY_MISMATCH",
            )

    def _model_info(self, proposer: Proposer) -> ModelInfo:
        return ModelInfo(
            name=proposer.name,
            vocab_size=0,
            max_model_len=0,
            eos_token_ids=(),
            dtype="",
            fingerprint="",
            vocabulary_fingerprint=proposer.vocabulary_fingerprint,
            proposer=proposer.name,
            num_speculative_tokens=self._config.num_speculative_tokens,
        )


def _count_step(metrics: EngineMetrics, stats: DraftStepStats) -> None:
    """On the draft loop's thread."""
    metrics.set_load(NodeLoad(num_running=stats.num_held, num_waiting=stats.num_waiting))
    metrics.observe_step(seconds=stats.seconds, num_rows=stats.num_requests)
    metrics.add_tokens(num_generated_tokens=stats.num_proposed_tokens)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One call for each decode node: reads newest states, writes newest answers."""

    def __init__(self, node: DraftNodeService) -> None:
        self._node = node
        self._open: dict[DraftPeer, asyncio.Event] = {}
        self._is_closing = False
        self._all_gone = asyncio.Event()

    async def Draft(  # noqa: N802 named by the proto
        self, request_iterator: AsyncIterator[draft_pb2.DraftUpdate], context: DraftContext
    ) -> None:
        async with rpc_errors(context):
            hello, first = await self._read_hello(request_iterator)
            loop = self._node.draft_loop()
            fault_point("draft.hello")
            await context.write(draft_pb2.DraftProposals(hello=info_to_proto(self._node.info())))
            event_loop = asyncio.get_running_loop()
            wake = asyncio.Event()

            def notify() -> None:  # called from the draft loop's thread
                event_loop.call_soon_threadsafe(wake.set)

            peer = loop.connect(hello, notify)
            self._open[peer] = wake
            _log.info("decode node connected", node=hello.name)
            reader = asyncio.create_task(_read_updates(loop, peer, first, request_iterator))
            reader.add_done_callback(lambda _task: wake.set())
            try:
                await self._write_answers(peer, wake, reader, context)
                if reader.done():
                    await reader  # raises what ended it
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
                del self._open[peer]
                if self._is_closing and not self._open:
                    self._all_gone.set()
                loop.disconnect(peer)
                _log.info("decode node gone", node=hello.name)

    async def close(self, deadline_seconds: float) -> None:
        """Ends every stream, and waits for them. Raises: TimeoutError."""
        self._is_closing = True
        for wake in self._open.values():
            wake.set()
        if self._open:
            await asyncio.wait_for(self._all_gone.wait(), deadline_seconds)

    async def _read_hello(
        self, request_iterator: AsyncIterator[draft_pb2.DraftUpdate]
    ) -> tuple[DraftHello, draft_pb2.DraftUpdate]:
        """Raises: InvalidRequestError without a hello, MismatchError for one that does not fit."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message carries the hello", field="hello")
        hello = hello_from_proto(first.hello)
        self._node.draft_loop()  # serving?
        self._node.check_fits(hello)
        return hello, first

    async def _write_answers(
        self, peer: DraftPeer, wake: asyncio.Event, reader: asyncio.Task[None], context: DraftContext
    ) -> None:
        """Each message is made when the last has been written, from what is newest then."""
        while not reader.done() and not self._is_closing:
            await wake.wait()
            wake.clear()
            answers = peer.take_answers()
            if answers:
                message = draft_pb2.DraftProposals(sequences=[proposals_to_proto(answer) for answer in answers])
                fault_point("draft.proposal")
                await context.write(message)


async def _read_updates(
    loop: DraftLoop,
    peer: DraftPeer,
    first: draft_pb2.DraftUpdate,
    request_iterator: AsyncIterator[draft_pb2.DraftUpdate],
) -> None:
    """Until the decode node closes its side."""
    message: draft_pb2.DraftUpdate | None = first
    while message is not None:
        if message.sequences:
            fault_point("draft.update")
            loop.submit(peer, [update_from_proto(update) for update in message.sequences])
        message = await anext(request_iterator, None)
