"""The router's link to one node. In a loop it connects, identifies and approves the node, and follows its reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from outrider.errors import NO_ADAPTER, MismatchError, ModelError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.node_stamp import NodeVersion
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS, negotiate
from outrider.request import Adapter
from outrider.rpc.status import UNREACHABLE
from outrider.service.announce import announce
from outrider.service.liveness import Liveness, ProgressDeadline, watch_progress
from outrider.service.telemetry.logging import get_logger
from outrider.session import Rejected
from router.nodes.breaker import Breaker
from router.nodes.room import Refusal, Size
from router.nodes.transport import DecodeSession, NodeTransport, RouterIdentity, racing

MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
POLL_BACKOFF_FACTOR = 1.1
"""Factor by which the backoff grows while a node is loading or is an alias. It is small, for frequent polling."""
IDENTIFY_SECONDS = 2.0
MAX_CONDITION = 200
"""Maximum characters of `NodeStatus.condition`."""
MAX_REFUSALS = 16
"""Maximum refusals kept per node, at most one per request size."""
ADAPTER_RETRY_SECONDS = 0.5
"""Seconds for which a node gets no requests for an adapter that it lacked, whatever it reports."""
LOSS_NOTICE_SECONDS = 0.1
"""Seconds to wait after a failed call to a node. If the node's reports end in this time, its process has ended."""

_log = get_logger("nodes")


def shorten_condition(condition: str) -> str:
    """Returns the condition, which has text from peers, as one printable line of up to `MAX_CONDITION` characters."""
    printable = (character if character.isprintable() else " " for character in condition[: 2 * MAX_CONDITION])
    line = " ".join("".join(printable).split())
    return line if len(line) <= MAX_CONDITION else f"{line[: MAX_CONDITION - 1]}…"


class LinkOwner(Protocol):
    """The owner of the links (`router.nodes.directory.NodeDirectory`). Only `approve` may wait."""

    async def approve(self, link: NodeLink, info: NodeInfo) -> str:
        """Returns the fingerprint to expect. Raises: MismatchError if the node does not fit; other OutriderErrors."""

    def on_link_change(self) -> None: ...

    def on_link_report(self) -> None:
        """Handles a report that changed only the load. It is called many times a second."""

    def on_link_loss(self, link: NodeLink) -> None: ...


class NodeLink:
    """A link to one address. Owned by the event loop; `run` continues until it is cancelled.

    A node is SERVING if it reports this state, its model was approved, and its reports arrive. It is late while a
    report or its current step is overdue. If it then makes no progress, it is LOST, and `report` is None until it
    serves again.
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
        self.stamp = NodeVersion("", "", "", "")  # for requests' records; empty until the node is identified
        self.report: NodeReport | None = None
        self.adapters: frozenset[Adapter] = frozenset()  # those that the node has; empty while no reports arrive
        self._refused: dict[Adapter | None, float] = {}  # monotonic times at which it lacked them
        self.state = NodeState.STARTING
        self.refusal = ""  # why the node must not be used; empty if it may be used
        self.last_error = ""  # why the node cannot be reached; empty if it is reachable
        self.max_model_len = 0  # as of the last approval; 0: a draft node, or never approved
        self.is_alias = False  # whether another link leads to the same process
        self.num_hedges = 0  # requests also opened on another node because this node is late
        self.breaker = Breaker()
        self.last_choice = 0  # value of the placement's counter when this node was last chosen
        self.transport = transport
        self._identity = identity
        self._owner = owner
        self._liveness_timeout_seconds = liveness_timeout_seconds
        self._fingerprint = ""
        self._listeners: set[Callable[[], None]] = set()
        self._progress = ProgressDeadline()

    @property
    def name(self) -> str:
        """The node's own name; until that is known, its role and address."""
        return self.info.name if self.info is not None else f"{self.role.name.lower()}@{self.address}"

    @property
    def incarnation(self) -> bytes:
        """The incarnation of the process that was last identified; empty before any is."""
        return self.info.incarnation if self.info is not None else b""

    @property
    def numerics(self) -> str:
        """The node's numerics; empty until known."""
        return self.info.model.numerics if self.info is not None and self.info.model is not None else ""

    @property
    def is_serving(self) -> bool:
        return self.state is NodeState.SERVING

    @property
    def can_blend(self) -> bool:
        """Whether the node blends prompts (ADR 52)."""
        return self.info is not None and self.info.model is not None and self.info.model.can_blend

    @property
    def is_connected(self) -> bool:
        """Whether reports arrive, including those of a draining node."""
        return self.report is not None

    @property
    def is_approved(self) -> bool:
        """Whether the node has been approved and has not been lost since."""
        return bool(self._fingerprint)

    @property
    def is_late(self) -> bool:
        """Whether the node's progress is overdue."""
        return self._progress.standing >= Liveness.LATE

    @property
    def is_silent(self) -> bool:
        """Whether the node is late and its reports are overdue by `SILENT_SECONDS` (`outrider.service.liveness`)."""
        return self._progress.standing >= Liveness.SILENT

    @property
    def condition(self) -> str:
        """A description of the node's problem for people, in one line; empty if there is none."""
        if self.last_error and self.last_error != self.refusal:
            return shorten_condition(f"unreachable: {self.last_error}")
        if self.refusal:
            return shorten_condition(f"refused: {self.refusal}")
        return "late" if self.is_late else ""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Adds a listener, which is called when the node becomes late, is on time again, drains or is lost.

        It must not block.
        """
        self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def has_adapter(self, adapter: Adapter | None) -> bool:
        """Whether requests for the adapter may go to the node. None: the model itself."""
        return adapter not in self._refused and (adapter is None or adapter in self.adapters)

    def add_refused_adapter(self, adapter: Adapter | None) -> None:
        """Records that the node has refused a request because it lacks the adapter. Its last report may be outdated."""
        self._refused[adapter] = time.monotonic()

    async def run(self) -> None:
        """Keeps the link up until it is cancelled."""
        pause = growth = 0.0
        try:
            while True:
                try:
                    info = await self.transport.identify(timeout_seconds=IDENTIFY_SECONDS)
                    is_usable = await self._identify(info)
                    if is_usable or growth != POLL_BACKOFF_FACTOR:
                        pause, growth = MIN_BACKOFF_SECONDS, POLL_BACKOFF_FACTOR
                    if is_usable:
                        await self._follow(info)
                except OutriderError as error:
                    self._take_failure(error)
                    pause, growth = pause or MIN_BACKOFF_SECONDS, 2.0
                await asyncio.sleep(pause)
                pause = min(pause * growth, MAX_BACKOFF_SECONDS)
        finally:
            await self.transport.close()

    async def _identify(self, info: NodeInfo) -> bool:
        """Records the node's identity and has the node approved. Returns whether to use it. Raises: MismatchError."""
        if info.role is not self.role:
            raise MismatchError(
                f"{self.address} is a {info.role.name.lower()} node, not a {self.role.name.lower()} node"
            )
        negotiate(SUPPORTED_VERSIONS, info.protocol_versions, us="this router", them=info.name)
        self.info = info
        self.stamp = NodeVersion(self.name, self.role.name.lower(), info.version, self.numerics)
        self.last_error = ""
        if info.state is not NodeState.SERVING:
            if self.state is not NodeState.LOST:
                self.state = info.state
            return False
        self._fingerprint = await self._owner.approve(self, info)
        self.refusal = ""
        return not self.is_alias

    async def _follow(self, info: NodeInfo) -> None:
        """Reads the node's reports until the node is lost. Raises: PeerLostError."""
        await self._until_lost(self._read_reports(info))

    async def _read_reports(self, info: NodeInfo) -> None:
        async with aclosing(self.transport.reports(incarnation=info.incarnation)) as reports:
            async for report in reports:
                self._take_report(report)

    async def _until_lost(self, reading: Coroutine[Any, Any, None]) -> None:
        """Runs `reading`, which processes reports, until the node is lost. Raises: PeerLostError, MismatchError."""
        self._progress = ProgressDeadline(grace_seconds=self._liveness_timeout_seconds)
        async with racing(reading, watch_progress(self._progress, self._on_overdue)) as (ended, _):
            if ended.done():
                ended.result()
            else:
                raise PeerLostError(f"{self.role.name.lower()} node {self.name} makes no progress", node=self.name)

    def _take_report(self, report: NodeReport) -> None:
        was_late = self.is_late
        has_changed = was_late or self.report is None or self.state is not report.state
        if report.adapters is not None and (adapters := frozenset(report.adapters)) != self.adapters:
            self.adapters, has_changed = adapters, True
        if self._refused:
            since = time.monotonic() - ADAPTER_RETRY_SECONDS
            self._refused = {adapter: at for adapter, at in self._refused.items() if at > since}
        if self.state is not report.state:
            _log.info("node changed state", node=self.name, address=self.address, state=report.state.name)
        self.report = report
        self.state = report.state
        self._progress.feed(report)
        if not self.is_late:
            self.num_hedges = 0
        if has_changed or self.is_late:
            self._notify_change()
        else:
            self._owner.on_link_report()

    def _on_overdue(self) -> None:
        _log.info(f"node is {self._progress.standing.name.lower()}", node=self.name, address=self.address)
        self._notify_change()

    def _notify_change(self) -> None:
        self._owner.on_link_change()
        for listener in tuple(self._listeners):
            listener()

    def _take_failure(self, error: OutriderError) -> None:
        was_up, was_draining = self.is_connected, self.state is NodeState.DRAINING
        self.last_error = error.message
        self._fingerprint = ""
        self.report, self.adapters = None, frozenset()
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
        self._notify_change()
        if was_draining and was_up:
            _log.info("node left", node=self.name, address=self.address)
        elif was_up:
            _log.warning("node lost", node=self.name, address=self.address, error=error.message)
            self.breaker.fail()
            self._owner.on_link_loss(self)


class PrefillLink(NodeLink):
    """A link to a prefill node, which computes prompts."""

    num_outstanding_tokens = 0  # uncached prompt tokens in flight from this router
    num_scored_tokens = 0  # tokens of the prompts in flight whose logprobs are wanted

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has the node compute and push the prompt's KV. Cancelling the call stops the node's work.

        Raises: PeerLostError for any failure, with the reason UNREACHABLE if the node is lost, and NO_ADAPTER if it has
        unloaded the adapter.
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
            if error.reason == UNREACHABLE:  # if the node's process has ended, its reports end, too
                await asyncio.wait((lost,), timeout=LOSS_NOTICE_SECONDS)
            reason = UNREACHABLE if lost.done() else NO_ADAPTER if error.reason == NO_ADAPTER else None
            if reason == NO_ADAPTER:
                self.add_refused_adapter(call.options.adapter)
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


class DecodeLink(NodeLink):
    """A link to a decode node, whose reports arrive in the session with it."""

    session: DecodeSession | None = None
    num_placed = 0  # requests of this router that are placed on the node
    refusals: Sequence[Refusal] = ()  # refusals that may still apply, the latest last

    @property
    def is_serving(self) -> bool:
        """Whether the node serves and its session is open."""
        return super().is_serving and self.session is not None and self.session.is_open

    async def _follow(self, info: NodeInfo) -> None:
        hello = self._identity.hello(fingerprint=self._fingerprint, reached_at=self.address)
        call = self.transport.open_session()
        session = self.session = DecodeSession(call, hello=hello, node=info, on_report=self._take_report)
        error: OutriderError = PeerLostError("the router is stopping", node=info.name, reason="ROUTER_STOPPING")
        try:
            await self._until_lost(session.run())
        except OutriderError as failure:
            error = failure
            raise
        finally:
            self.session = None
            try:
                self._owner.on_link_change()  # placement must not use the node any more
            finally:
                session.close(error)

    def has_room(self, size: Size, now: float) -> bool:
        """Whether no refusal keeps a request of this size out."""
        if not self.refusals or self.report is None:
            return True
        load = self.report.load
        return not any(refusal.keeps_out(size, load, now) for refusal in self.refusals)

    def change_room(self, size: Size, sign: int) -> None:
        """Updates the refusals when a request of this size begins (`sign` -1) or ends (`sign` 1) on the node."""
        for refusal in self.refusals:
            refusal.num_freed_tokens += sign * size.num_tokens
            refusal.num_freed_samples += sign * size.num_samples

    def add_refusal(self, rejected: Rejected, size: Size) -> None:
        """Records that the node had no room for a request of this size."""
        now = time.monotonic()
        load = NodeLoad() if self.report is None else self.report.load
        others = [other for other in self.refusals if other.size != size and other.keeps_out(other.size, load, now)]
        self.refusals = (*others, Refusal(rejected, now, size))[-MAX_REFUSALS:]

    def open_session(self) -> DecodeSession:
        """Returns the current session. Raises: PeerLostError."""
        if self.session is None or not self.session.is_open:
            raise PeerLostError(f"decode node {self.name} is lost", node=self.name)
        return self.session
