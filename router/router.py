"""Builds the router's parts, waits for nodes, and drains."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc.aio
from prometheus_client import REGISTRY, CollectorRegistry

from outrider.errors import PeerLostError
from outrider.node import NodeRole
from outrider.rpc.tls import PLAINTEXT, PeerSecurity
from outrider.service.open_calls import OpenCalls
from outrider.service.pages import FindPage
from outrider.service.request_limits import ENGINE_SERVICE
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.v1 import router_pb2_grpc
from router.api.clients import Clients
from router.api.pages import RouterPages
from router.api.registry import RequestRegistry
from router.api.servicer import SERVICE_NAME, RouterServicer
from router.config import RouterConfig
from router.durability.keeper import AnswerReplicator
from router.durability.receipts.keeper import ReceiptKeeper, make_sink
from router.durability.store.base import AnswerStore
from router.nodes.directory import NodeDirectory
from router.nodes.transport import RouterIdentity
from router.observe.records import Records
from router.requests.answer_budget import AnswerBudget, LoopClock
from router.requests.driver import RouterContext
from router.scheduling.placement import Placement
from router.scheduling.request_queue import RequestQueue
from router.store_address import MEMORY, store_address

if TYPE_CHECKING:
    from router.api.vllm_engine.servicer import VllmEngineServicer

FINAL_STATUS_SECONDS = 0.5
"""Seconds that a draining router waits until its calls' final statuses are sent."""
HANDOVER_SECONDS = 1.0
"""Seconds during which a draining router still accepts requests, while load balancers already see NOT_SERVING."""
GATEWAY_HANDOVER_SECONDS = 5.0
"""Seconds of the handover if a gateway checks the router's health. It checks each second, and leaves at 3 failures."""

_INCARNATION_BYTES = 16

_log = get_logger("router")


class Router:
    """The router process's service (`outrider.service.server.FrontService`). SERVING while a decode node serves."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        name: str = "",
        resolver: Resolver = resolve_with_dns,
        security: PeerSecurity = PLAINTEXT,
        clients: Clients | None = None,
        registry: CollectorRegistry = REGISTRY,
        store: AnswerStore | None = None,
        shows_text: bool = False,
        tracer: Tracer = NO_TRACER,
        reasoning_parser: str = "",
    ) -> None:
        """Builds the parts that need no node.

        `store` is used instead of the store that `config` names. `shows_text`: whether the router's page shows the text
        of answers. `reasoning_parser`: the parser of the gateways that call the router. Raises: ConfigError.
        """
        self._config = config
        self._tracer = tracer
        self._records = Records(records_tokens=shows_text, tracer=tracer)
        self._registry = registry
        identity = RouterIdentity(name=name or f"router-{os.getpid()}", incarnation=os.urandom(_INCARNATION_BYTES))
        self.nodes = NodeDirectory(config, identity, resolver=resolver, security=security, on_lost=self._on_lost)
        self.context: RouterContext | None = None  # None until a node serves
        self.requests = RequestRegistry(self.nodes, self._context_now, clients or Clients(), tracer)
        self.calls = OpenCalls(on_refused=lambda error: self.requests.count_failure(error.reason))
        self.servicer = RouterServicer(self.requests)
        self._vllm_engine = _make_vllm_engine(self.requests, reasoning_parser)
        self.service_names: tuple[str, ...] = (
            (SERVICE_NAME,) if self._vllm_engine is None else (SERVICE_NAME, ENGINE_SERVICE)
        )
        if store is None and config.store != MEMORY:
            address = store_address(config.store)
            from router.durability.store.valkey import ValkeyAnswerStore

            store = ValkeyAnswerStore(  # connects on first use
                address,
                owner=identity.incarnation,
                timeout_seconds=config.store_timeout_seconds,
                lease_seconds=config.store_lease_seconds,
            )
        self._store = store
        self._name = identity.name
        self._clock: LoopClock | None = None
        self._receipt_sink = make_sink(config, incarnation=identity.incarnation)
        self._receipts: ReceiptKeeper | None = None  # None: the router has not started, or `router.receipts` is empty

    def add_to(self, server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(self.servicer, server)
        if self._vllm_engine is not None:
            self._vllm_engine.add_to(server)

    async def start(self, address: str) -> None:
        """Starts the router's parts and waits for the nodes."""
        self._tracer.start(self._name)
        self._clock = LoopClock()
        self.nodes.start()
        await self.nodes.wait_until_serving()
        served = self.nodes.model()
        config = self._config
        placement = Placement(self.nodes, prefill_outstanding_tokens=config.prefill_outstanding_tokens)
        queue = RequestQueue(
            placement,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            no_node_timeout_seconds=config.no_node_timeout_seconds,
        )
        placement.on_room = queue.pump
        metrics = RouterMetrics(model_name=served.info.name, registry=self._registry)
        metrics.follow_running(lambda: placement.num_placed)
        metrics.follow_waiting(lambda: queue.num_waiting)
        metrics.follow_waiting_tokens(lambda: queue.num_waiting_tokens)
        metrics.follow_oldest_wait(queue.oldest_wait_seconds)
        if self._receipt_sink is not None:
            self._receipts = ReceiptKeeper(self._receipt_sink, router=self._name, on_lost=metrics.add_lost_receipts)
        self.context = RouterContext(
            config=config,
            queue=queue,
            placement=placement,
            answers=AnswerBudget(config.answer_memory_bytes, clock=self._clock),
            metrics=metrics,
            records=self._records,
            router_address=address,
            receipts=self._receipts,
        )
        self.nodes.on_report(queue.pump)
        if self._store is not None:
            self.requests.keeper = AnswerReplicator(
                self._store,
                restore=self.requests.restore,
                may_serve_without=config.store_lost == "serve",
                append_seconds=config.store_append_seconds,
                renew_seconds=config.store_lease_seconds / 3,
            )

    def pages(self) -> FindPage:
        """Returns the pages of the metrics port."""
        return RouterPages(self.requests, self.nodes, self._records, loop=asyncio.get_running_loop())

    def follow_readiness(self, tell: Callable[[bool], None]) -> None:
        tell(bool(self.nodes.decode_nodes))  # prefill nodes are not required, because decode nodes can compute prompts
        self.nodes.on_change(lambda: tell(bool(self.nodes.decode_nodes)))

    async def drain(self, deadline_seconds: float) -> None:
        """Refuses new requests after the handover period. At the deadline, fails the rest, queued or not."""
        deadline = asyncio.get_running_loop().time() + deadline_seconds
        self.requests.is_handing_over = True
        has_gateway = self._vllm_engine is not None and self._vllm_engine.is_watched
        handover_seconds = GATEWAY_HANDOVER_SECONDS if has_gateway else HANDOVER_SECONDS
        await asyncio.sleep(min(handover_seconds, deadline_seconds / 2))
        self.requests.is_draining = True
        try:
            async with asyncio.timeout_at(deadline):
                await self.requests.wait_until_idle()
        except TimeoutError:
            _log.warning("drain deadline passed", num_requests=len(self.requests))
            self.requests.fail_all(_stopping())
        self.servicer.end_watches()
        if num_calls := await self.calls.wait_for_open(FINAL_STATUS_SECONDS):
            _log.warning("clients have not read the end of their answers", num_calls=num_calls)

    async def stop(self) -> None:
        self.requests.is_draining = True
        self.requests.fail_all(_stopping())  # in case a drain was cut off
        if self.requests.keeper is not None:
            await self.requests.keeper.stop()
        self.requests.close_all(_stopping())
        await self.nodes.stop()
        if self._clock is not None:
            self._clock.close()
        if self._receipts is not None:
            await self._receipts.stop()

    def describe(self) -> Mapping[str, Any]:
        model = self.requests.model()
        return {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "proposer": model.proposer,
            "num_speculative_tokens": model.num_speculative_tokens,
            "nodes": [status.name for status in self.nodes.statuses()],
        }

    def _context_now(self) -> RouterContext:
        if self.context is None:
            raise PeerLostError("the router is waiting for nodes", reason="NO_NODE")
        return self.context

    def _on_lost(self, role: NodeRole) -> None:
        if self.context is not None:
            self.context.metrics.add_lost_nodes(role.name.lower(), 1)


def _stopping() -> PeerLostError:
    """Returns the error that makes clients with a resume window continue at another router."""
    return PeerLostError("the router is stopping", reason="DRAINING")


def _make_vllm_engine(requests: RequestRegistry, reasoning_parser: str) -> VllmEngineServicer | None:
    """Makes the service by which gateways use the router as a vLLM engine. None if smg-grpc-proto is missing."""
    try:
        from router.api.vllm_engine.servicer import VllmEngineServicer
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 it is incompatible with the installed protobuf and grpc
        _log.warning("the engine service is not served: smg-grpc-proto cannot be imported", error=str(error))
        return None
    return VllmEngineServicer(requests, reasoning_parser)
