"""The decode node as a service: one event loop in front of the engine thread and the KV ingest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from decode_node.commands import DrainExpired, DrainStarted, EventsBySession
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.client import DraftClient, DraftClientStatus
from decode_node.ingest import Ingest
from decode_node.metrics import DecodeMetrics
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.sessions import Sessions
from decode_node.step import StepStats
from outrider.engine.engine import Engine
from outrider.engine_node import TargetNode, TargetParts
from outrider.node import NodeLoad, NodeRole, NodeState
from outrider.service.node_service import SERVICE_NAME as NODE_SERVICE_NAME
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import node_pb2_grpc, session_pb2_grpc

DRAIN_POLL_SECONDS = 0.02
METRICS_SECONDS = 1.0

_log = get_logger("decode_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts(TargetParts):
    engine: Engine
    loop: DecodeLoop
    groups: SequenceGroupManager
    ingest: Ingest
    drafts: DraftClient | None  # None if no draft nodes are configured


Emit = Callable[[EventsBySession, StepStats | None], None]
Build = Callable[[bytes, str, Emit], DecodeParts]
"""Builds the parts from the incarnation, the node's name and `emit`. Blocks while the model is loaded."""


class DecodeNode(TargetNode[DecodeParts]):
    """A Service (see `outrider.service.server`) for sequence groups."""

    service_names: tuple[str, ...] = ("outrider.v1.DecodeService", NODE_SERVICE_NAME)

    def __init__(
        self,
        *,
        build: Build,
        configured_name: str,
        session_timeout_seconds: float,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        super().__init__(
            NodeRole.DECODE,
            build=lambda: build(self._incarnation, self._name, self._emit),
            configured_name=configured_name,
            tracer=tracer,
        )
        self._metrics: DecodeMetrics | None = None
        self._metrics_task: asyncio.Task[None] | None = None
        self._sessions = Sessions(
            submit=self._submit,
            has_room=lambda session_id: self._parts is None or self._parts.loop.has_room(session_id),
            info=self.info,
            report=self.report,
            timeout_seconds=session_timeout_seconds,
            tracer=tracer,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_DecodeServiceServicer_to_server(self._sessions, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self._node_servicer, server)

    async def start(self, address: str) -> None:
        """Loads the model, then opens the KV ingest, the draft streams and the sessions."""
        parts = await self._build(address)
        self._metrics = DecodeMetrics(parts.model.name, pool=parts.engine.pool)
        parts.ingest.start()
        if parts.drafts is not None:
            await parts.drafts.start()
        self._thread.run()
        self._metrics_task = asyncio.create_task(self._sync_metrics(), name="metrics")
        self._sessions.is_open = True
        self._state = NodeState.SERVING

    async def drain(self, deadline_seconds: float) -> None:
        """Refuses new groups. Running groups end, are migrated by their router, or fail at the deadline.

        Returns when the last events have been sent.
        """
        self._state = NodeState.DRAINING
        self._sessions.report_now()  # so that routers migrate this node's requests soon
        parts = self._parts
        if parts is None:
            return
        self._submit(DrainStarted())
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._until_idle(parts)
        except TimeoutError:
            _log.warning("drain deadline passed", num_groups=parts.groups.num_groups)
            self._submit(DrainExpired())
            try:
                async with asyncio.timeout(1.0):
                    await self._until_idle(parts)
            except TimeoutError:
                _log.error("groups did not end after the drain deadline", num_groups=parts.groups.num_groups)

    async def stop(self) -> None:
        parts = self._parts
        if parts is None:
            return
        if self._metrics_task is not None:
            self._metrics_task.cancel()
        parts.loop.stop()
        await asyncio.to_thread(self._thread.join, 5.0)
        if parts.drafts is not None:
            await parts.drafts.stop()
        await asyncio.to_thread(parts.ingest.receiver.stop)
        if parts.groups.kept_answers is not None:
            await asyncio.to_thread(parts.groups.kept_answers.close)

    async def _until_idle(self, parts: DecodeParts) -> None:
        # Polled, since the engine thread must not know about event loops. The sleep between the two polls lets the
        # event loop deliver what the engine thread emitted last.
        while not parts.loop.is_drained:  # noqa: ASYNC110 see above
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await asyncio.sleep(DRAIN_POLL_SECONDS)
        while self._sessions.has_unsent_events:  # noqa: ASYNC110 see above
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    # --- between engine thread and event loop ---------------------------------------------

    def _emit(self, events: EventsBySession, stats: StepStats | None) -> None:
        """Hands events to the event loop. Called from the engine thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._deliver, events, stats)

    def _deliver(self, events: EventsBySession, stats: StepStats | None) -> None:
        self._sessions.deliver(events)
        if stats is not None:
            self._sessions.traces.observe_preempted(stats.preempted_groups)
        if self._metrics is not None:
            self._metrics.observe(events, stats)

    async def _sync_metrics(self) -> None:
        while self._parts is not None and self._metrics is not None:
            try:
                self._metrics.sync(
                    load=self._load(),
                    received=self._parts.ingest.inbox.counters(),
                    drafts=DraftClientStatus() if self._parts.drafts is None else self._parts.drafts.status(),
                    prefix_lookups=self._parts.groups.prefix_lookups,
                    ranks=self._parts.engine.runner.rank_load,
                )
            except Exception as error:  # noqa: BLE001 a bug in one figure must not stop all figures for good
                _log.error("metrics could not be updated", error=str(error), exc_info=error)
            await asyncio.sleep(METRICS_SECONDS)

    # --- load -----------------------------------------------------------------------------

    def _load(self) -> NodeLoad:
        assert self._parts is not None
        assert self._metrics is not None, "made with the parts"
        engine, recent = self._parts.engine, self._metrics.recent
        return NodeLoad(
            num_running=engine.scheduler.num_running,
            num_waiting=self._parts.groups.num_waiting,
            kv_blocks_total=engine.pool.num_blocks,
            kv_blocks_free=engine.pool.num_free_in_scarcest,
            tokens_per_second=recent.tokens.per_second(),
            mean_acceptance_length=recent.mean_acceptance_length(),
            num_sequences_free=self._parts.groups.num_sequences_free,
            look_ahead_hit_rate=recent.look_ahead_hit_rate(),
            kv_bytes_per_second=recent.kv_bytes.per_second(),
        )
