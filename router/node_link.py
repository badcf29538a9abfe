"""The router's connection to one node, and all that it knows of it: dial → identify → approve → follow, repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.errors import MismatchError, ModelError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.node_stamp import NodeStamp
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS, negotiate
from outrider.rpc.status import UNREACHABLE
from outrider.service.announce import announce
from outrider.service.liveness import ProgressDeadline, Standing, watch_progress
from outrider.service.telemetry.logging import get_logger
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected
from router.breaker import Breaker
from router.sessions import DecodeSession
from router.transport import NodeTransport, RouterIdentity

LEAST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
POLL_SECONDS = 0.1
"""How often a node that still loads is asked again."""
IDENTIFY_SECONDS = 2.0
MAX_CONDITION = 200
"""Characters of `NodeStatus.condition`."""
NOTICE_SECONDS = 0.1
"""Between a call's end and the end of the reports, where a process has ended."""

_log = get_logger("nodes")


def shorten_condition(condition: str) -> str:
    """On one line, printable, and no longer than the contract says: peers' words are in it."""
    printable = (character if character.isprintable() else " " for character in condition[: 2 * MAX_CONDITION])
    line = " ".join("".join(printable).split())
    return line if len(line) <= MAX_CONDITION else f"{line[: MAX_CONDITION - 1]}…"


class LinkOwner(Protocol):
    """Who has the links (`router.node_directory.NodeDirectory`). Only `approve` may wait."""

    async def approve(self, link: NodeLink, info: NodeInfo) -> str:
        """The fingerprint served. Raises: MismatchError for a node that does not fit; OutriderError."""

    def link_changed(self) -> None: ...

    def link_reported(self) -> None:
        """Nothing but the load has changed: many times a second."""

    def link_lost(self, link: NodeLink) -> None: ...


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
        address: str,
        transport: NodeTransport,
        identity: RouterIdentity,
        owner: LinkOwner,
        liveness_timeout_seconds: float,
    ) -> None:
        self.role = role
        self.address = address
        self.info: NodeInfo | None = None
        self.stamp = NodeStamp("", "", "", "")  # what requests say of it, once it has been identified
        self.report: NodeReport | None = None
        self.state = NodeState.STARTING
        self.refusal = ""  # why the node is not used; empty when it may be
        self.last_error = ""  # why it could not be reached, while it cannot
        self.is_alias = False  # another link leads to the same process
        self.num_hedges = 0  # requests that were opened elsewhere because it is late
        self.breaker = Breaker()
        self.chosen_at = 0  # when placement chose it last, as a count of its choices
        self.transport = transport
        self._identity = identity
        self._owner = owner
        self._liveness_timeout_seconds = liveness_timeout_seconds
        self._fingerprint = ""
        self._listeners: set[Callable[[], None]] = set()
        self._progress = ProgressDeadline()

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

    @property
    def is_approved(self) -> bool:
        """It fits, and was not lost since it said so."""
        return bool(self._fingerprint)

    @property
    def is_late(self) -> bool:
        """Its progress is overdue; it is not lost yet."""
        return self._progress.standing >= Standing.LATE

    @property
    def is_silent(self) -> bool:
        """It is late, and no report has come for longer."""
        return self._progress.standing >= Standing.SILENT

    @property
    def condition(self) -> str:
        """What is wrong with it, on one line for people to read; empty when nothing is."""
        if self.last_error and self.last_error != self.refusal:
            return shorten_condition(f"unreachable: {self.last_error}")
        if self.refusal:
            return shorten_condition(f"refused: {self.refusal}")
        return "late" if self.is_late else ""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """It is called when the node becomes late, is on time again, drains or is lost. It must not block."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
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
                    backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)
                else:
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            await self.transport.close()

    async def _identify(self, info: NodeInfo) -> bool:
        """Whether the node may be used now. Raises: MismatchError."""
        if info.role is not self.role:
            raise MismatchError(
                f"{self.address} is a {info.role.name.lower()} node, not a {self.role.name.lower()} node"
            )
        negotiate(SUPPORTED_VERSIONS, info.protocol_versions, us="this router", them=info.name)
        self.info = info
        self.stamp = NodeStamp(self.name, self.role.name.lower(), info.version, self.numerics)
        self.last_error = ""
        if info.state is not NodeState.SERVING:
            if self.state is not NodeState.LOST:
                self.state = info.state
            return False
        self._fingerprint = await self._owner.approve(self, info)
        self.refusal = ""
        return not self.is_alias

    async def _follow(self, info: NodeInfo) -> None:
        """Takes the node's reports until it is lost. Raises: PeerLostError."""
        await self._until_lost(self._read_reports(info))

    async def _read_reports(self, info: NodeInfo) -> None:
        async with aclosing(self.transport.reports(incarnation=info.incarnation)) as reports:
            async for report in reports:
                self._take_report(report)

    async def _until_lost(self, reading: Coroutine[Any, Any, None]) -> None:
        """`reading` takes reports; it is ended when they stay away. Raises: PeerLostError, MismatchError."""
        self._progress = ProgressDeadline(grace_seconds=self._liveness_timeout_seconds)
        tasks = [asyncio.ensure_future(work) for work in (reading, watch_progress(self._progress, self._on_overdue))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                raise PeerLostError(f"{self.role.name.lower()} node {self.name} makes no progress", node=self.name)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_report(self, report: NodeReport) -> None:
        was_late = self.is_late
        has_changed = was_late or self.report is None or self.state is not report.state
        if self.state is not report.state:
            _log.info("node changed state", node=self.name, address=self.address, state=report.state.name)
        self.report = report
        self.state = report.state
        self._progress.feed(report)
        if not self.is_late:
            self.num_hedges = 0
        if has_changed or self.is_late:
            self._tell_change()
        else:
            self._owner.link_reported()

    def _on_overdue(self) -> None:
        _log.info(f"node is {self._progress.standing.name.lower()}", node=self.name, address=self.address)
        self._tell_change()

    def _tell_change(self) -> None:
        self._owner.link_changed()
        for listener in tuple(self._listeners):
            listener()

    def _take_failure(self, error: OutriderError) -> None:
        was_up, was_draining = self.is_connected, self.state is NodeState.DRAINING
        self.last_error = error.message
        self._fingerprint = ""
        self.report = None
        self._progress = ProgressDeadline()
        self.num_hedges = 0
        is_refused = isinstance(error, (MismatchError, ModelError))
        if is_refused:
            if self.refusal != error.message:
                _log.error("node refused", node=self.name, address=self.address, error=error.message)
                announce(refused=shorten_condition(error.message), address=self.address)
            self.refusal = error.message
        if was_up or is_refused:
            self.state = NodeState.LOST
        self._tell_change()
        if was_draining and was_up:
            _log.info("node left", node=self.name, address=self.address)
        elif was_up:
            _log.warning("node lost", node=self.name, address=self.address, error=error.message)
            self.breaker.fail()
            self._owner.link_lost(self)


class PrefillLink(NodeLink):
    """A prefill node: prompts go there."""

    num_outstanding_tokens = 0  # uncached prompt tokens that this router sent
    num_scored_tokens = 0  # of its prompts there whose logprobs are wanted

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has the prompt's KV computed and pushed. Cancelling stops both.

        Raises: PeerLostError for whatever kept the node from it; UNREACHABLE is the reason where the node is lost.
        """
        lost = asyncio.get_running_loop().create_future()

        def watch() -> None:
            if not self.is_connected and not lost.done():
                lost.set_result(None)

        self.add_listener(watch)
        work = asyncio.ensure_future(self.transport.prefill(call))
        try:
            watch()
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise PeerLostError(f"prefill node {self.name} is lost", node=self.name, reason=UNREACHABLE)
            figures = work.result()
        except OutriderError as error:
            self.breaker.fail()
            if error.reason == UNREACHABLE:  # the end of the process is noticed with it, or a little later
                await asyncio.wait((lost,), timeout=NOTICE_SECONDS)
            reason = UNREACHABLE if lost.done() else None
            message = f"prefill node {self.name} failed: {error.message}"
            raise PeerLostError(message, node=self.name, reason=reason) from error
        else:
            self.breaker.succeed()
            return figures
        finally:
            self.remove_listener(watch)
            lost.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError, OutriderError):
                    await work


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decode node had no room. It is not asked again with a whole prompt before a report shows what was missing.

    After `NO_ROOM_RETRY_SECONDS` it is asked whatever the report shows.
    """

    rejected: Rejected
    at: float  # monotonic seconds

    def has_waited(self, now: float) -> bool:
        """As long as the node asked for."""
        return now >= self.at + self.rejected.wait_seconds

    def is_over(self, load: NodeLoad, now: float) -> bool:
        has_blocks = load.kv_blocks_free >= self.rejected.kv_blocks_needed
        has_room = has_blocks and load.num_sequences_free >= self.rejected.num_sequences_needed
        return now >= self.at + NO_ROOM_RETRY_SECONDS or (self.has_waited(now) and has_room)


class DecodeLink(NodeLink):
    """A decode node: followed by its session, which carries its reports."""

    session: DecodeSession | None = None
    num_placed = 0  # requests that this router placed there
    no_room: Refusal | None = None

    @property
    def is_serving(self) -> bool:
        """Its session is open, too."""
        return super().is_serving and self.session is not None and self.session.is_open

    async def _follow(self, info: NodeInfo) -> None:
        stream = await self.transport.open_session(self._identity, fingerprint=self._fingerprint)
        session = self.session = DecodeSession(stream, node=info, on_report=self._take_report)
        error: OutriderError = PeerLostError("the router is stopping", node=info.name, reason="ROUTER_STOPPING")
        try:
            await self._until_lost(session.run())
        except OutriderError as failure:
            error = failure
            raise
        finally:
            self.session = None
            self._owner.link_changed()  # nothing is placed there any more
            session.close(error)

    def has_room(self, now: float) -> bool:
        """False: it has refused a request, and its last report shows no more room."""
        return self.no_room is None or self.report is None or self.no_room.is_over(self.report.load, now)

    def open_session(self) -> DecodeSession:
        """The session in force. Raises: PeerLostError."""
        if self.session is None or not self.session.is_open:
            raise PeerLostError(f"decode node {self.name} is lost", node=self.name)
        return self.session
