"""The router's connection to one node: dial → identify → approve → follow, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

import grpc.aio

from outrider.errors import MismatchError, ModelError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeRole, NodeState
from outrider.protocol_versions import SUPPORTED_VERSIONS, negotiate
from outrider.service.node_service import NodeWatcher
from outrider.service.telemetry.logging import get_logger
from outrider.v1 import prefill_pb2_grpc
from router.sessions import DecodeSession, RouterIdentity

LEAST_BACKOFF_SECONDS = 0.1
MOST_BACKOFF_SECONDS = 2.0
POLL_SECONDS = 0.1
"""How often a node that still loads is asked again."""
IDENTIFY_SECONDS = 2.0

_log = get_logger("nodes")
Approve = Callable[["NodeLink", NodeInfo], Awaitable[str]]
"""Raises MismatchError for a node that does not fit, else gives the fingerprint served."""


class LossListener(Protocol):
    """Who has work on a node."""

    def on_lost(self, error: OutriderError) -> None: ...


class NodeLink:
    """One address. Owned by the event loop; `run` goes on until it is cancelled.

    A node is SERVING here when it says so, its model fits, and its reports arrive. When
    they cease it is LOST, with no report, until it serves again.
    """

    def __init__(
        self,
        *,
        role: NodeRole,
        target: str,
        address: str,
        channel: grpc.aio.Channel,
        identity: RouterIdentity,
        approve: Approve,
        on_change: Callable[[], None],
        on_lost: Callable[[NodeLink, OutriderError], None],
        liveness_timeout_seconds: float,
    ) -> None:
        self.role = role
        self.target = target
        self.address = address
        self.info: NodeInfo | None = None
        self.report: NodeReport | None = None
        self.state = NodeState.STARTING
        self.refusal = ""  # why the node is not used; empty when it may be
        self.last_error = ""  # why it could not be reached, while it cannot
        self.is_alias = False  # another link leads to the same process
        self.channel = channel
        self.watcher = NodeWatcher(channel, target=address, grace_seconds=liveness_timeout_seconds)
        self._identity = identity
        self._liveness_timeout_seconds = liveness_timeout_seconds
        self._fingerprint = ""
        self._approve = approve
        self._on_change = on_change
        self._on_lost = on_lost
        self._listeners: set[LossListener] = set()

    @property
    def name(self) -> str:
        """The node's own, or role and address before it has said it."""
        return self.info.name if self.info is not None else f"{self.role.name.lower()}@{self.address}"

    @property
    def numerics(self) -> str:
        """How it computes; empty before it has said so."""
        return self.info.model.numerics if self.info is not None and self.info.model is not None else ""

    @property
    def is_serving(self) -> bool:
        return self.state is NodeState.SERVING

    @property
    def is_connected(self) -> bool:
        """Whether reports arrive: also from a node that drains."""
        return self.report is not None

    def add_listener(self, listener: LossListener) -> None:
        self._listeners.add(listener)

    def remove_listener(self, listener: LossListener) -> None:
        self._listeners.discard(listener)

    async def run(self) -> None:
        """Keeps the link up. Ends only by cancellation."""
        backoff = LEAST_BACKOFF_SECONDS
        try:
            while True:
                try:
                    info = await self.watcher.get_node(timeout_seconds=IDENTIFY_SECONDS)
                    if await self._identify(info):
                        backoff = LEAST_BACKOFF_SECONDS
                        await self._follow(info)
                except OutriderError as error:
                    self._take_failure(error)
                    await asyncio.sleep(backoff)
                    backoff = min(backoff * 2, MOST_BACKOFF_SECONDS)
                else:
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            await self.channel.close()

    async def _identify(self, info: NodeInfo) -> bool:
        """Whether the node may be used now. Raises: MismatchError."""
        if info.role is not self.role:
            raise MismatchError(
                f"{self.address} is a {info.role.name.lower()} node, not a {self.role.name.lower()} node"
            )
        negotiate(SUPPORTED_VERSIONS, info.protocol_versions, us="this router", them=info.name)
        self.info = info
        self.last_error = ""
        if info.state is not NodeState.SERVING:
            if self.state is not NodeState.LOST:
                self.state = info.state
            return False
        self._fingerprint = await self._approve(self, info)
        self.refusal = ""
        return not self.is_alias

    async def _follow(self, info: NodeInfo) -> None:
        """Takes the node's reports until it is lost. Raises: PeerLostError."""
        async with aclosing(self.watcher.reports(incarnation=info.incarnation)) as reports:
            async for report in reports:
                self._take_report(report)

    def _take_report(self, report: NodeReport) -> None:
        if self.state is not report.state:
            _log.info("node changed state", node=self.name, address=self.address, state=report.state.name)
        self.report = report
        self.state = report.state
        self._on_change()

    def _take_failure(self, error: OutriderError) -> None:
        was_up, was_draining = self.is_connected, self.state is NodeState.DRAINING
        self.last_error = error.message
        if isinstance(error, (MismatchError, ModelError)):
            if self.refusal != error.message:
                _log.error("node refused", node=self.name, address=self.address, error=error.message)
            self.refusal = error.message
            self.state = NodeState.LOST
        if was_up:
            self.report = None
            self.state = NodeState.LOST
            listeners, self._listeners = list(self._listeners), set()
            for listener in listeners:
                listener.on_lost(error)
            if was_draining:
                _log.info("node left", node=self.name, address=self.address)
            else:
                _log.warning("node lost", node=self.name, address=self.address, error=error.message)
                self._on_lost(self, error)
        self._on_change()


class PrefillLink(NodeLink):
    """A prefill node: prompts go there."""

    def prefill_stub(self) -> prefill_pb2_grpc.PrefillServiceStub:
        return prefill_pb2_grpc.PrefillServiceStub(self.channel)


class DecodeLink(NodeLink):
    """A decode node: followed by its session, which carries its reports."""

    session: DecodeSession | None = None

    async def _follow(self, info: NodeInfo) -> None:
        session = DecodeSession(
            self.channel,
            address=self.address,
            node=info,
            identity=self._identity,
            fingerprint=self._fingerprint,
            liveness_timeout_seconds=self._liveness_timeout_seconds,
            on_report=self._take_report,
        )
        self.session = session
        try:
            await session.run()
        finally:
            self.session = None

    def open_session(self) -> DecodeSession:
        """The session in force. Raises: PeerLostError."""
        if self.session is None or not self.session.is_open:
            raise PeerLostError(f"decode node {self.name} is lost", node=self.name)
        return self.session
