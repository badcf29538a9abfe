"""The router's connection to one node: dial → identify → approve → follow, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Protocol

from outrider.errors import MismatchError, ModelError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeRole, NodeState
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS, negotiate
from outrider.service.liveness import LATE_SECONDS, SILENT_SECONDS, STALL_SECONDS, ProgressDeadline
from outrider.service.telemetry.logging import get_logger
from router.sessions import DecodeSession
from router.transport import NodeTransport, RouterIdentity

LEAST_BACKOFF_SECONDS = 0.1
MOST_BACKOFF_SECONDS = 2.0
POLL_SECONDS = 0.1
"""How often a node that still loads is asked again."""
IDENTIFY_SECONDS = 2.0

_log = get_logger("nodes")
Approve = Callable[["NodeLink", NodeInfo], Awaitable[str]]
"""Raises MismatchError for a node that does not fit, else gives the fingerprint served."""


class LinkListener(Protocol):
    """Told when the standing of a node changes: late, on time again, draining. Must not block."""

    def on_standing(self) -> None: ...


class NodeLink:
    """One address. Owned by the event loop; `run` goes on until it is cancelled.

    A node is SERVING here when it says so, its model fits, and its reports arrive. While a
    report or its step is overdue it is late; when its progress stays away it is LOST, with
    no report, until it serves again.
    """

    def __init__(
        self,
        *,
        role: NodeRole,
        target: str,
        address: str,
        transport: NodeTransport,
        identity: RouterIdentity,
        approve: Approve,
        on_change: Callable[[], None],
        on_report: Callable[[], None],
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
        self.is_late = False  # its progress is overdue; it is not lost yet
        self.num_latenesses = 0  # how often it became late
        self.is_silent = False  # it is late, and no report has come for longer
        self.transport = transport
        self._identity = identity
        self._liveness_timeout_seconds = liveness_timeout_seconds
        self._fingerprint = ""
        self._approve = approve
        self._on_change = on_change
        self._on_report = on_report
        self._on_lost = on_lost
        self._listeners: set[LinkListener] = set()
        self._progress = ProgressDeadline()
        self._late_timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The node's own, or role and address before it has said it."""
        return self.info.name if self.info is not None else f"{self.role.name.lower()}@{self.address}"

    @property
    def incarnation(self) -> bytes:
        """Of the process that was identified last; empty before."""
        return self.info.incarnation if self.info is not None else b""

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

    def add_listener(self, listener: LinkListener) -> None:
        self._listeners.add(listener)

    def remove_listener(self, listener: LinkListener) -> None:
        self._listeners.discard(listener)

    async def run(self) -> None:
        """Keeps the link up. Ends only by cancellation."""
        backoff = LEAST_BACKOFF_SECONDS
        try:
            while True:
                try:
                    info = await self.transport.identify(timeout_seconds=IDENTIFY_SECONDS)
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
            self._stop_late_timer()
            await self.transport.close()

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
        async with aclosing(self.transport.reports(incarnation=info.incarnation)) as reports:
            async for report in reports:
                self._take_report(report)

    def _take_report(self, report: NodeReport) -> None:
        has_changed = self.is_late or self.report is None
        if self.state is not report.state:
            _log.info("node changed state", node=self.name, address=self.address, state=report.state.name)
            has_changed = True
        if self.report is None:
            self._progress = ProgressDeadline()
        self.report = report
        self.state = report.state
        self._progress.feed(report)
        self._set_late(is_late=self._progress.is_late())
        self.is_silent = False
        self._set_late_timer()
        if has_changed:
            self._tell_standing()
            self._on_change()
        else:
            self._on_report()

    def _set_late(self, *, is_late: bool) -> None:
        self.num_latenesses += is_late and not self.is_late
        self.is_late = is_late

    def _set_late_timer(self, least_seconds: float = 0.01) -> None:
        """One timer a link, moved only when it fires: reports come many times a second."""
        if self._late_timer is None and not self.is_silent:
            loop = asyncio.get_running_loop()
            progress = self._progress
            left_seconds = progress.seconds_until_silent() if self.is_late else progress.seconds_until_late()
            due = loop.time() + max(left_seconds, least_seconds)
            self._late_timer = loop.call_at(due, self._on_late_timer, due)

    def _on_late_timer(self, due: float) -> None:
        self._late_timer = None
        loop = asyncio.get_running_loop()
        if loop.time() - due > STALL_SECONDS:  # this process was stalled: reports may lie unread
            again = loop.time() + STALL_SECONDS
            self._late_timer = loop.call_at(again, self._on_late_timer, again)
        elif not self.is_connected:
            return
        elif self.is_late and not self._progress.seconds_until_silent():
            self.is_silent = True
            _log.info("node is silent", node=self.name, address=self.address)
            self._tell_standing()
        elif not self.is_late and self._progress.is_late():
            self._set_late(is_late=True)
            # After a stall of this process both may be long overdue: silent is only what stays away from here on, too.
            self._set_late_timer(SILENT_SECONDS - LATE_SECONDS)
            _log.info("node is late", node=self.name, address=self.address)
            self._tell_standing()
            self._on_change()
        else:
            self._set_late_timer()

    def _stop_late_timer(self) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None

    def _tell_standing(self) -> None:
        for listener in tuple(self._listeners):
            listener.on_standing()

    def _take_failure(self, error: OutriderError) -> None:
        was_up, was_draining = self.is_connected, self.state is NodeState.DRAINING
        self.last_error = error.message
        self._stop_late_timer()
        self.is_late = self.is_silent = False
        if isinstance(error, (MismatchError, ModelError)):
            if self.refusal != error.message:
                _log.error("node refused", node=self.name, address=self.address, error=error.message)
            self.refusal = error.message
            self.state = NodeState.LOST
        if was_up:
            self.report = None
            self.state = NodeState.LOST
            self._tell_standing()
            if was_draining:
                _log.info("node left", node=self.name, address=self.address)
            else:
                _log.warning("node lost", node=self.name, address=self.address, error=error.message)
                self._on_lost(self, error)
        self._on_change()


class PrefillLink(NodeLink):
    """A prefill node: prompts go there."""

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has the prompt's KV computed and pushed. Cancelling stops both.

        Raises: PeerLostError for whatever kept the node from it, its loss included.
        """
        lost = asyncio.get_running_loop().create_future()
        watch = _LossWatch(self, lost)
        self.add_listener(watch)
        work = asyncio.ensure_future(self.transport.prefill(call))
        try:
            watch.on_standing()
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise PeerLostError(f"prefill node {self.name} is lost", node=self.name)
            return work.result()
        except OutriderError as error:
            raise PeerLostError(f"prefill node {self.name} failed: {error.message}", node=self.name) from error
        finally:
            self.remove_listener(watch)
            lost.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError, OutriderError):
                    await work


class _LossWatch:
    """Resolves a future when a link's node is lost."""

    def __init__(self, link: NodeLink, lost: asyncio.Future[None]) -> None:
        self._link = link
        self._lost = lost

    def on_standing(self) -> None:
        if not self._link.is_connected and not self._lost.done():
            self._lost.set_result(None)


class DecodeLink(NodeLink):
    """A decode node: followed by its session, which carries its reports."""

    session: DecodeSession | None = None

    async def _follow(self, info: NodeInfo) -> None:
        session = DecodeSession(
            await self.transport.open_session(self._identity, fingerprint=self._fingerprint),
            node=info,
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
