"""The decode node as a service: two threads' worth of work behind one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from decode_node.commands import DrainExpired, DrainStarted, EventsBySession
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.client import DraftClient, NoDrafts
from decode_node.ingest import Ingest
from decode_node.metrics import DecodeMetrics
from decode_node.sequence_group_manager import SequenceGroupManager
from decode_node.servicer import DecodeServicer
from decode_node.sessions import Sessions
from decode_node.statistics import StepStats
from outrider import __version__
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.service.engine_failure import end_process
from outrider.service.node_service import SERVICE_NAME as NODE_SERVICE_NAME
from outrider.service.node_service import NodeServicer, default_node_name, make_incarnation
from outrider.service.profiling import ProfileDesk
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import node_pb2_grpc, session_pb2_grpc

DRAIN_POLL_SECONDS = 0.02
METRICS_SECONDS = 1.0

_log = get_logger("decode_node")


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """What the composition root has built; the loop is not running yet."""

    engine: Engine
    loop: DecodeLoop
    groups: SequenceGroupManager
    ingest: Ingest
    drafts: DraftClient | NoDrafts
    model: ModelInfo
    tokenizer_files: Mapping[str, bytes]
    ranks: AbstractContextManager[object]  # entered while the loop runs
    description: Mapping[str, object]  # for the start-up line


Emit = Callable[[EventsBySession, StepStats | None], None]
Build = Callable[[bytes, str, Emit], DecodeParts]
"""(incarnation, node name, emit) → parts. Blocking: loads the model."""


class DecodeNode:
    """A Service (see `outrider.service.server`)."""

    service_names: tuple[str, ...] = ("outrider.v1.DecodeService", NODE_SERVICE_NAME)

    def __init__(
        self,
        *,
        build: Build,
        configured_name: str,
        session_timeout_seconds: float,
        allows_profiles: bool = True,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._build = build
        self._configured_name = configured_name
        self._tracer = tracer
        self._incarnation = make_incarnation()
        self._name = configured_name or "decode"
        self._state = NodeState.STARTING
        self._parts: DecodeParts | None = None
        self._metrics: DecodeMetrics | None = None
        self._metrics_task: asyncio.Task[None] | None = None
        self._servicer = DecodeServicer()
        self._profiles = ProfileDesk(
            is_allowed=allows_profiles,
            can_be_traced=lambda: self._parts is not None and self._parts.engine.runner.can_be_traced,
            node_name=lambda: self._name,
            submit=self._submit,
        )
        self._thread: EngineThread[DecodeParts] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._sessions = Sessions(
            submit=self._submit,
            has_room=self._has_room,
            info=self._info,
            report=self._report,
            timeout_seconds=session_timeout_seconds,
            tracer=tracer,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_DecodeServiceServicer_to_server(self._servicer, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(
            NodeServicer(
                self._info,
                self._report,
                lambda: self._parts.tokenizer_files if self._parts else None,
                self._profiles,
            ),
            server,
        )

    async def start(self, address: str) -> None:
        """Loads the model, then opens the KV ingest, the draft streams and the sessions."""
        self._name = default_node_name("decode_node", address, configured=self._configured_name)
        self._tracer.start(self._name)
        self._event_loop = asyncio.get_running_loop()
        thread = self._thread = EngineThread(
            "decode-loop",
            build=lambda: self._build(self._incarnation, self._name, self._emit),
            run=_run,
            on_failure=end_process,
        )
        parts = self._parts = await thread.build()
        self._metrics = DecodeMetrics(parts.model.name)
        parts.ingest.start()
        await parts.drafts.start()
        thread.run()
        self._metrics_task = asyncio.create_task(self._sync_metrics(), name="metrics")
        self._servicer.sessions = self._sessions
        self._state = NodeState.SERVING

    async def drain(self, deadline_seconds: float) -> None:
        """No new groups. What runs ends, is moved by its router, or is given up at the deadline.

        Returns when the last events are sent.
        """
        self._state = NodeState.DRAINING
        self._sessions.report_now()  # routers move what runs here: the sooner they know the better
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
                _log.error("groups were not given up in time", num_groups=parts.groups.num_groups)

    async def stop(self) -> None:
        parts = self._parts
        if parts is None:
            return
        if self._metrics_task is not None:
            self._metrics_task.cancel()
        parts.loop.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)
        await parts.drafts.stop()
        await asyncio.to_thread(parts.ingest.stop)
        if parts.groups.kept_answers is not None:
            await asyncio.to_thread(parts.groups.kept_answers.close)

    def describe(self) -> dict[str, Any]:
        return dict(self._parts.description) if self._parts else {}

    async def _until_idle(self, parts: DecodeParts) -> None:
        # Polled: the engine thread must not know about event loops. What it emitted before it
        # was drained has been delivered when the first sleep after that is over.
        while not parts.loop.is_drained:  # noqa: ASYNC110 see above
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await asyncio.sleep(DRAIN_POLL_SECONDS)
        while self._sessions.has_unsent_events:  # noqa: ASYNC110 see above
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    # --- engine thread ⇄ event loop -------------------------------------------------------

    def _submit(self, command: Any) -> None:
        if self._parts is not None:
            self._parts.loop.submit(command)

    def _has_room(self, session_id: int) -> bool:
        return self._parts is None or self._parts.loop.has_room(session_id)

    def _emit(self, events: EventsBySession, stats: StepStats | None) -> None:
        """Called from the engine thread."""
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
                    drafts=self._parts.drafts.status(),
                    prefix_lookups=self._parts.groups.prefix_lookups,
                )
            except Exception as error:  # noqa: BLE001 a bug in one figure must not stop all figures for good
                _log.error("metrics failed", error=str(error), exc_info=error)
            await asyncio.sleep(METRICS_SECONDS)

    # --- who this is, and how it is doing -------------------------------------------------

    def _info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self._incarnation,
            name=self._name,
            role=NodeRole.DECODE,
            state=self._state,
            version=__version__,
            model=self._parts.model if self._parts else None,
        )

    def _report(self) -> NodeReport:
        report = NodeReport(state=self._state, incarnation=self._incarnation)
        if self._parts is None:
            return report
        progress = self._parts.loop.progress
        at_hand = progress.at_hand
        return replace(
            report,
            step=at_hand.step,
            expected_step_seconds=at_hand.expected_seconds,
            step_age_seconds=progress.age_seconds(at_hand),
            load=self._load(),
        )

    def _load(self) -> NodeLoad:
        assert self._parts is not None
        assert self._metrics is not None, "made with the parts"
        engine, recent = self._parts.engine, self._metrics.recent
        return NodeLoad(
            num_running=engine.scheduler.num_running,
            num_waiting=self._parts.groups.num_waiting,
            kv_blocks_total=engine.pool.num_blocks,
            kv_blocks_free=engine.pool.num_free_blocks,
            tokens_per_second=recent.tokens_per_second(),
            mean_acceptance_length=recent.mean_acceptance_length(),
            num_sequences_free=self._parts.groups.num_sequences_free,
            look_ahead_hit_rate=recent.look_ahead_hit_rate(),
            kv_bytes_per_second=recent.kv_bytes_per_second(),
        )


def _run(parts: DecodeParts) -> None:
    with parts.ranks:
        parts.loop.run()
