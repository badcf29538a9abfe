"""The draft node as a service: the draft loop's thread behind one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from draft_node.config import DraftNodeConfig
from draft_node.draft_loop import DraftLoop, DraftStepStats
from draft_node.held_sequences import max_held_bytes
from draft_node.servicer import DraftServicer
from outrider.engine_node import EngineNode, end_process
from outrider.errors import PeerLostError
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.node import ModelInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.rpc.tls import PLAINTEXT, PeerSecurity
from outrider.service.node_service import NodeServicer
from outrider.service.telemetry.metrics import EngineMetrics
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.speculation.draft_stream import MAX_BRANCH_TOKENS
from outrider.speculation.proposers.base import Proposer
from outrider.v1 import draft_pb2_grpc, node_pb2_grpc

MIN_EXPECTED_STEP_SECONDS = 1.0
"""Lower limit of a step's expected seconds, since a step that computes a long prefix may follow a short one."""


class DraftNode(EngineNode[DraftLoop]):
    """A Service (see `outrider.service.server`) for drafts."""

    service_names: tuple[str, ...] = ("outrider.v1.DraftService", "outrider.v1.NodeService")

    def __init__(
        self,
        config: DraftNodeConfig,
        make_proposer: Callable[[], Proposer],
        *,
        name: str = "",
        registry: CollectorRegistry,
        tracer: Tracer = NO_TRACER,
        security: PeerSecurity = PLAINTEXT,
        on_loop_failure: Callable[[Exception], None] = end_process,
    ) -> None:
        """`make_proposer` is called in the draft loop's thread. `name`: by default, the role and the address."""
        super().__init__(
            NodeRole.DRAFT,
            build=self._build_loop,
            run=DraftLoop.run,
            on_failure=on_loop_failure,
            configured_name=name,
            tracer=tracer,
        )
        self._config = config
        self._registry = registry
        self._make_proposer = make_proposer
        self._connector = Connector(KvTransferConfig(connector="grpc"), security)  # messages carry what is read
        self._proposer: Proposer | None = None  # None until `start`
        self._streams = DraftServicer(self.draft_loop, self.info, tracer)

    def add_to(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._streams, server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(self.info, self.report), server)

    async def start(self, address: str) -> None:
        """Makes the proposer in the draft loop's thread, and starts the loop."""
        await self._build(address)
        self._state = NodeState.SERVING
        self._thread.run()

    async def drain(self, deadline_seconds: float) -> None:
        """Ends all streams at once, since decode nodes continue without drafts."""
        self._state = NodeState.DRAINING
        await self._streams.close(deadline_seconds)

    async def stop(self) -> None:
        self._state = NodeState.DRAINING
        if self._parts is not None:
            self._parts.stop()
            await asyncio.to_thread(self._thread.join, 5.0)
        self._connector.close()

    def _build_loop(self) -> DraftLoop:
        """Builds the draft loop, in its thread."""
        proposer = self._proposer = self._make_proposer()
        metrics = EngineMetrics(model_name=proposer.info.name, registry=self._registry)
        return DraftLoop(
            proposer,
            max_alternatives=self._config.max_alternatives,
            connector=self._connector,
            on_step=partial(_count_step, metrics),
        )

    def describe(self) -> Mapping[str, Any]:
        assert self._proposer is not None, "started"
        info = self._proposer.info
        return {
            "proposer": info.name,
            "vocabulary_fingerprint": info.vocabulary_fingerprint,
            "look_ahead": self._config.max_alternatives if info.can_look_ahead else 0,
            # An upper bound that does not include model weights.
            "memory_bytes": max_held_bytes(has_head=info.features is not None) + info.memory_bytes,
            **info.description,
        }

    def draft_loop(self) -> DraftLoop:
        """Returns the loop. Raises: PeerLostError while the node starts or drains; callers may try another node."""
        if self._parts is None or self._state is not NodeState.SERVING:
            raise PeerLostError(f"draft node {self._name} is {self._state.name.lower()}", node=self._name)
        return self._parts

    def report(self) -> NodeReport:
        loop = self._parts
        if loop is None:
            return NodeReport(state=self._state, incarnation=self._incarnation)
        started = loop.step_started_at
        return NodeReport(
            state=self._state,
            incarnation=self._incarnation,
            mark=loop.num_steps,
            num_steps=loop.num_steps,
            expected_step_seconds=0.0 if started is None else max(loop.last_step_seconds, MIN_EXPECTED_STEP_SECONDS),
            step_age_seconds=0.0 if started is None else max(0.0, time.monotonic() - started),
            load=loop.load(),
        )

    def _model(self) -> ModelInfo | None:
        if self._proposer is None:
            return None
        proposer = self._proposer.info
        return ModelInfo(
            name=proposer.name,
            vocab_size=0,
            max_model_len=0,
            eos_token_ids=(),
            dtype="",
            fingerprint="",
            vocabulary_fingerprint=proposer.vocabulary_fingerprint,
            proposer=proposer.name,
            num_speculative_tokens=MAX_BRANCH_TOKENS,
            features=proposer.features,
        )


def _count_step(metrics: EngineMetrics, stats: DraftStepStats) -> None:
    """Counts a step in the metrics. Called from the draft loop's thread."""
    metrics.set_load(NodeLoad(num_running=stats.num_held, num_waiting=stats.num_waiting))
    metrics.observe_step(seconds=stats.seconds, num_rows=stats.num_requests)
    metrics.add_tokens(num_generated_tokens=stats.num_proposed_tokens + stats.num_ahead_tokens)
    metrics.add_look_ahead(num_tokens=stats.num_ahead_tokens, num_wasted_tokens=stats.num_wasted_tokens)
