"""The router: builds its parts, waits for nodes, drains."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY, CollectorRegistry

from outrider.errors import PeerLostError
from outrider.node import NodeRole
from outrider.rpc.peer_security import PLAINTEXT, PeerSecurity
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.v1 import router_pb2_grpc
from router.admission import Admission
from router.answer_budget import AnswerBudget
from router.answer_keeper import AnswerKeeper
from router.clients import Clients
from router.config import RouterConfig
from router.departures import Departures
from router.hedge_budget import HedgeBudget
from router.node_directory import NodeDirectory
from router.placement import Placement
from router.request_flow import FlowServices
from router.servicer import SERVICE_NAME, RouterServicer
from router.store.address import MEMORY
from router.store.base import AnswerStore
from router.store.factory import make_store
from router.transport import RouterIdentity

TELL_SECONDS = 0.5
"""How long clients have to take the news that the router gives their requests up."""

_INCARNATION_BYTES = 16

_log = get_logger("router")


class Router:
    """Implements `outrider.service.server.Service`. SERVING while a prefill and a decode node serve."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        config: RouterConfig,
        *,
        resolver: Resolver = resolve_with_dns,
        security: PeerSecurity = PLAINTEXT,
        clients: Clients | None = None,
        registry: CollectorRegistry = REGISTRY,
        make_store: Callable[[bytes], AnswerStore | None] | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        identity = RouterIdentity(
            name=config.server.name or f"router-{os.getpid()}", incarnation=os.urandom(_INCARNATION_BYTES)
        )
        self.nodes = NodeDirectory(config, identity, resolver=resolver, security=security, on_lost=self._on_lost)
        self.services: FlowServices | None = None  # None: no node has served yet
        self.servicer = RouterServicer(
            self.nodes, self._services_now, clients, max_message_bytes=config.server.max_message_bytes
        )
        self.desk = self.servicer.desk
        make = partial(_make_store, config) if make_store is None else make_store
        self._store = make(identity.incarnation)  # connects on first use

    def add_to(self, server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(self.servicer, server)

    async def start(self, address: str) -> None:
        """Waits for the nodes."""
        self.nodes.start()
        await self.nodes.wait_until_serving()
        served = self.nodes.model()
        config = self._config
        placement = Placement(self.nodes, prefill_outstanding_tokens=config.prefill_outstanding_tokens)
        admission = Admission(
            placement,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            no_node_timeout_seconds=config.no_node_timeout_seconds,
        )
        placement.when_room(admission.pump)
        self.services = FlowServices(
            config=config,
            admission=admission,
            placement=placement,
            hedges=HedgeBudget(lambda: placement.num_placed, are_others_timely=placement.are_others_timely),
            answers=AnswerBudget(config.journal_bytes),
            departures=Departures(config.max_left_requests),
            metrics=RouterMetrics(model_name=served.info.name, registry=self._registry),
            router_address=address,
        )
        self.nodes.on_report(_pump_and_count(self.services))
        if self._store is not None:
            self.desk.keeper = AnswerKeeper(
                self._store,
                restore=self.desk.restore,
                may_serve_without=config.store_lost == "serve",
                append_seconds=config.store_append_seconds,
                renew_seconds=config.store_lease_seconds / 3,
            )

    def follow_readiness(self, tell: Callable[[bool], None]) -> None:
        """See `outrider.service.health.DependsOnOthers`."""
        tell(self.nodes.can_serve)
        self.nodes.on_change(lambda: tell(self.nodes.can_serve))

    async def drain(self, deadline_seconds: float) -> None:
        """No new request; running ones end, or are told at the deadline, the queue included."""
        self.desk.is_draining = True
        running = self.desk.running
        if not await _comes_about(running.wait_until_idle(), deadline_seconds):
            _log.warning("drain deadline passed", num_requests=len(running))
            running.fail_all(PeerLostError("the router is stopping", reason="DRAINING"))
        self.servicer.end_watches()
        if num_calls := await self.servicer.calls.wait_for_present(TELL_SECONDS):
            _log.warning("clients do not read their answers' ends", num_calls=num_calls)

    async def stop(self) -> None:
        await self.desk.keeper.stop()
        self.desk.running.close_all()
        await self.nodes.stop()

    def describe(self) -> Mapping[str, Any]:
        info = self.nodes.model().info
        proposer, num_speculative_tokens = self.nodes.proposer()
        return {
            "model": info.name,
            "fingerprint": info.fingerprint,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "proposer": proposer,
            "num_speculative_tokens": num_speculative_tokens,
            "nodes": [status.name for status in self.nodes.statuses()],
        }

    def _services_now(self) -> FlowServices:
        if self.services is None:
            raise PeerLostError("the router waits for nodes", reason="NO_NODE")
        return self.services

    def _on_lost(self, role: NodeRole) -> None:
        if self.services is not None:
            self.services.metrics.add_lost_node(role.name.lower())


def _make_store(config: RouterConfig, owner: bytes) -> AnswerStore | None:
    """None: nobody shares it. Raises: ConfigError."""
    if config.store == MEMORY:
        return None
    return make_store(
        config.store,
        owner=owner,
        timeout_seconds=config.store_timeout_seconds,
        lease_seconds=config.store_lease_seconds,
    )


async def _comes_about(condition: Coroutine[Any, Any, None], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await condition
    except TimeoutError:
        return False
    return True


def _pump_and_count(services: FlowServices) -> Callable[[], None]:
    """What happens after every report: whoever waits gets what has become free."""
    shown = (-1, -1)

    def on_change() -> None:
        nonlocal shown
        services.admission.pump()
        load = services.placement.num_placed, services.admission.num_waiting
        if load != shown:
            shown = load
            services.metrics.set_load(num_running=load[0], num_waiting=load[1])

    return on_change
