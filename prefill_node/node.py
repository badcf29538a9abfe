"""The prefill node as a service: the engine thread behind one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from outrider.engine_node import EXIT_ENGINE_FAILED, TargetNode, TargetParts
from outrider.errors import InternalError, PeerLostError
from outrider.kv_transfer.connectors import Connector
from outrider.lossy_stream import exit_now
from outrider.node import NodeLoad, NodeRole, NodeState
from outrider.prefill import PrefillFigures
from outrider.service.node_service import SERVICE_NAME as NODE_SERVICE_NAME
from outrider.service.server import HANDOVER_SECONDS
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import PrefillMetrics
from outrider.service.telemetry.recent_sum import RecentSum
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import node_pb2_grpc, prefill_pb2_grpc
from prefill_node.jobs import JobEnded, Stop
from prefill_node.prefill_loop import PrefillLoop
from prefill_node.servicer import PendingJobs, PrefillServicer, ServedModel
from prefill_node.statistics import StepStats

LAST_ANSWERS_SECONDS = 0.5
"""Seconds allowed for sending the last answers at the end of a drain or after a failure of the engine thread."""
STOP_SECONDS = 5.0

_log = get_logger("prefill_node")

Emit = Callable[[Sequence[JobEnded], StepStats | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParts(TargetParts):
    loop: PrefillLoop
    connector: Connector


Build = Callable[[Emit], PrefillParts]
"""A function that builds the node's parts, given `emit`. It blocks while the model loads."""


class PrefillNode(TargetNode[PrefillParts]):
    """A Service (see `outrider.service.server`) for prompts."""

    service_names: tuple[str, ...] = ("outrider.v1.PrefillService", NODE_SERVICE_NAME)

    def __init__(
        self,
        *,
        build: Build,
        configured_name: str,
        max_jobs: int,
        tracer: Tracer = NO_TRACER,
        exit_process: Callable[[int], None] = exit_now,
    ) -> None:
        """`exit_process` is called when the engine thread has failed; it ends the process at once."""
        super().__init__(
            NodeRole.PREFILL,
            build=lambda: build(self._emit),
            on_failure=self._engine_failed,
            configured_name=configured_name,
            tracer=tracer,
        )
        self._exit_process = exit_process
        self._metrics: PrefillMetrics | None = None
        self._kv_bytes = RecentSum()
        self._servicer = PrefillServicer(tracer)
        self._jobs = PendingJobs(submit=self._submit, max_jobs=max_jobs)

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self._node_servicer, server)

    async def start(self, address: str) -> None:
        """Loads the model, starts the engine thread and accepts requests."""
        parts = await self._build(address)
        self._metrics = PrefillMetrics(model_name=parts.model.name)
        tokens = parts.loop.prompt_tokens
        self._metrics.follow_outstanding(lambda: tokens.num_outstanding)
        self._metrics.follow_saturation(tokens.saturation)
        self._thread.run()
        pool = parts.engine.pool
        self._metrics.show_cache(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            has_prefix_cache=pool.enable_prefix_cache,
            host=pool.host,
        )
        max_tokens = min(parts.model.max_model_len, pool.num_blocks_together * pool.block_size)
        self._servicer.serve(self._jobs, ServedModel(node_name=self._name, info=parts.model, max_tokens=max_tokens))
        self._state = NodeState.SERVING

    async def drain(self, deadline_seconds: float) -> None:
        """Waits for jobs to end; at the deadline, fails the rest. Refuses new jobs once routers know of the drain."""
        self._state = NodeState.DRAINING
        try:
            async with asyncio.timeout(deadline_seconds):
                await asyncio.sleep(min(HANDOVER_SECONDS, deadline_seconds / 2))
                self._jobs.start_draining()
                await self._jobs.wait_until_idle()
        except TimeoutError:
            self._jobs.start_draining()
            _log.warning("drain deadline passed", num_jobs=self._jobs.num_jobs)
            self._jobs.fail_all(PeerLostError(f"prefill node {self._name} is draining", reason="DRAINING"))
        if num_calls := await self._servicer.calls.wait_for_open(LAST_ANSWERS_SECONDS):
            _log.warning("routers have not read their answers", num_calls=num_calls)

    async def stop(self) -> None:
        parts = self._parts
        if parts is None:
            return
        parts.loop.submit(Stop())
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        await asyncio.to_thread(parts.connector.close)

    # ---- engine thread ⇄ event loop

    def _emit(self, ended: Sequence[JobEnded], stats: StepStats | None) -> None:
        """Hands ended jobs to the event loop. Called from the engine thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._deliver, ended, stats)

    def _deliver(self, ended: Sequence[JobEnded], stats: StepStats | None) -> None:
        self._jobs.deliver(ended)
        metrics = self._metrics
        assert metrics is not None
        for end in ended:
            if isinstance(end.result, PrefillFigures):
                _observe(metrics, end.result)
                self._kv_bytes.add(end.result.kv_bytes)
        if stats is not None:
            metrics.observe_step(seconds=stats.seconds, num_rows=stats.num_rows)
            metrics.add_step_parts(stats.nanoseconds)
        metrics.set_load(self._load())
        assert self._parts is not None
        if (ranks := self._parts.engine.runner.rank_load) is not None:
            metrics.set_ranks(**ranks._asdict())

    def _engine_failed(self, error: Exception) -> None:
        """Ends the process, whose state is not to be trusted after a bug. Called from the engine thread."""
        assert self._event_loop is not None
        _log.error("the engine thread failed; the process ends", error=str(error), exc_info=error)
        self._event_loop.call_soon_threadsafe(self._fail_and_exit, error)

    def _fail_and_exit(self, error: Exception) -> None:
        """Fails all jobs, then exits. The supervisor starts another process."""
        assert self._event_loop is not None
        self._state = NodeState.LOST
        self._jobs.start_draining()
        self._jobs.fail_all(InternalError(f"the engine thread failed: {error}"))
        self._event_loop.call_later(LAST_ANSWERS_SECONDS, self._exit_process, EXIT_ENGINE_FAILED)

    # ---- load

    def _load(self) -> NodeLoad:
        assert self._parts is not None
        engine, loop = self._parts.engine, self._parts.loop
        return NodeLoad(
            num_running=engine.scheduler.num_running,
            num_waiting=loop.num_waiting,
            kv_blocks_total=engine.pool.num_blocks,
            kv_blocks_free=engine.pool.num_free_in_scarcest,
            tokens_per_second=loop.prompt_tokens.tokens_per_second(),
            num_outstanding_tokens=loop.prompt_tokens.num_outstanding,
            max_rows_per_step=engine.scheduler.max_rows_per_step,
            kv_bytes_per_second=self._kv_bytes.per_second(),
        )


def _observe(metrics: PrefillMetrics, result: PrefillFigures) -> None:
    num_prompt_tokens = result.num_cached_tokens + result.num_read_tokens + result.num_computed_tokens
    metrics.add_tokens(num_prompt_tokens=num_prompt_tokens)
    metrics.add_prefix_lookup(num_query_tokens=num_prompt_tokens, num_hit_tokens=result.num_cached_tokens)
    metrics.observe_transfer(
        connector=result.connector,
        num_bytes=result.kv_bytes,
        seconds=result.transfer_seconds,
        exposed_seconds=result.exposed_seconds,
    )
