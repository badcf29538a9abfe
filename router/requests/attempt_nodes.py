"""An attempt's resources on nodes: its place, its sequence group on the decode node, its prefill call."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from outrider.errors import OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeState
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import traceparent_of
from outrider.session import OpenSequenceGroup, RetargetSequenceGroup, SampleTokens, SequenceGroupEvent
from router.nodes.link import NodeLink, PrefillLink
from router.nodes.transport import DecodeSession
from router.observe.record import AttemptRecord
from router.observe.spans import Span
from router.requests import events as on
from router.requests import instructions as do
from router.scheduling.placement import Demand, Place

_log = get_logger("attempts")


def node_of(link: NodeLink) -> on.Node:
    """Returns the identity of the node's current process."""
    return on.Node(link.name, link.incarnation, link.numerics)


def _for_decode_node(command: OpenSequenceGroup) -> OpenSequenceGroup:
    """Returns the command that a decode node gets: KV of a blended prompt is shared with no other group."""
    options = command.options
    if options.blend is None:
        return command
    salt = hashlib.sha256(b"outrider.blend\0" + command.sequence_group_id + options.cache_salt).digest()
    return replace(command, options=replace(options, blend=None, cache_salt=salt))


class AttemptNodes:
    """Passes events of nodes to the machine and performs the machine's instructions on nodes. Owned by the event loop.

    It is the listener of its sequence group (`router.nodes.transport.GroupListener`) and of its nodes' links.
    """

    def __init__(
        self,
        command: OpenSequenceGroup,
        place: Place,
        record: AttemptRecord,
        feed: Callable[[on.Event], None],
        *,
        fingerprint: str,
        may_take_over: Callable[[PrefillLink, Demand], bool],
    ) -> None:
        """`fingerprint`: the model's. `may_take_over`: whether another prefill node may take over from a late one."""
        if place.prefill is None or not place.prefill.can_blend:
            command = replace(command, options=replace(command.options, blend=None))
        self.place = place
        self.record = record
        self.is_closed = False
        self._command = command
        self._feed = feed
        self._fingerprint = fingerprint
        self._may_replace = may_take_over
        self._decode_incarnation = place.decode.incarnation
        self._session: DecodeSession | None = None  # None: the group is not open yet, or is closed
        # None: no call is running, or its result is no longer wanted.
        self._prefill: asyncio.Task[PrefillFigures] | None = None
        self._watched: PrefillLink | None = None  # the node of the running prefill call

    @property
    def id(self) -> bytes:
        return self._command.sequence_group_id

    @property
    def is_prefill_running(self) -> bool:
        return self._prefill is not None

    # ----------------------------------------------------------- events of nodes

    def on_event(self, event: SequenceGroupEvent) -> None:
        if type(event) is SampleTokens:
            fault_point("router.token")
        self._feed(event)

    def on_lost(self, error: OutriderError) -> None:
        """Passes the end of the decode node's session to the machine."""
        lost = error if isinstance(error, PeerLostError) else PeerLostError(error.message)
        self._feed(on.SessionLost(self.id, lost))

    def _on_decode_change(self) -> None:
        decode = self.place.decode
        self._feed(on.DecodeNodeChanged(self.id, decode.is_late, decode.state is NodeState.DRAINING))

    def _on_prefill_change(self) -> None:
        if self._watched is not None and self._may_replace(self._watched, self.place.demand):
            self._feed(on.PrefillLate(self.id))

    def _on_prefill_end(self, span: Span, task: asyncio.Task[PrefillFigures]) -> None:
        error = asyncio.CancelledError("cancelled by gRPC") if task.cancelled() else task.exception()
        if task is not self._prefill:
            was_stopped = error is None or task.cancelled()
            self.record.end_prefill(span, "given up" if was_stopped else str(error))
            return
        self._prefill = None
        if error is not None and not isinstance(error, PeerLostError):
            _log.error("a prefill call failed", request_id=self._command.request_id, exc_info=error)
            error = PeerLostError(f"the prefill call failed: {error}")
        self.record.end_prefill(span, task.result() if error is None else str(error))
        self._feed(on.PrefillEnded(self.id, task.result() if error is None else error))

    # ----------------------------------------------------------- instructions of the machine

    def open(self) -> None:
        """Sends the command that opens the group."""
        decode = self.place.decode
        self.record.ask()
        decode.add_listener(self._on_decode_change)
        try:
            session = decode.open_session()
            session.open_group(_for_decode_node(self._command), self)
        except PeerLostError as error:
            self._feed(on.SessionLost(self.id, error))
            return
        self._session = session
        if decode.is_late or decode.state is NodeState.DRAINING:
            self._on_decode_change()

    def perform(self, instruction: do.AttemptInstruction) -> None:
        self.PERFORM[type(instruction)](self, instruction)

    def _start_prefill(self, wanted: do.StartPrefill) -> None:
        link = self.place.prefill
        assert link is not None, "the machine has seen a prefill node"
        span = self.record.begin_prefill(link)
        call = PrefillCall.of_grant(
            wanted.granted,
            self._command,
            decode_incarnation=self._decode_incarnation,
            fingerprint=self._fingerprint,
            may_read_held=wanted.may_read_held,
            traceparent=traceparent_of(span.traced),
        )
        self._watched = link
        link.add_listener(self._on_prefill_change)
        self._prefill = asyncio.create_task(link.prefill(call), name="prefill")
        self._prefill.add_done_callback(lambda task: self._on_prefill_end(span, task))

    def _stop_prefill(self, _instruction: do.StopPrefill) -> None:
        self._unwatch()
        task, self._prefill = self._prefill, None
        if task is not None:
            task.cancel()

    def _choose_prefill(self, wanted: do.ChoosePrefill) -> None:
        place = self.place
        is_chosen = place.change_prefill(replace(place.demand, avoided=wanted.avoided))
        chosen = node_of(place.prefill) if is_chosen and place.prefill is not None else None
        self._feed(on.PrefillChosen(self.id, chosen))

    def _release_prefill(self, _instruction: do.ReleasePrefill) -> None:
        self._unwatch()
        self.place.release_prefill()

    def _retarget(self, wanted: do.Retarget) -> None:
        self._unwatch()
        self.record.ask("for another transfer")
        command = RetargetSequenceGroup(
            sequence_group_id=self.id, transfer_id=wanted.transfer_id, keeps_received=wanted.keeps_received
        )
        if self._session is not None:
            self._session.retarget(command)

    def _cancel_samples(self, unwanted: do.CancelSamples) -> None:
        if self._session is not None:
            self._session.cancel(self.id, unwanted.samples)

    def _close(self, instruction: do.CloseAttempt) -> None:
        """Releases everything except a running prefill call, whose statistics may still be wanted."""
        self.is_closed = True
        self._unwatch()
        self.record.end(instruction.why)
        self.place.decode.remove_listener(self._on_decode_change)
        session, self._session = self._session, None
        if session is not None:
            session.forget(self.id)
            if instruction.must_cancel:
                session.cancel(self.id)
        if instruction.frees_hedge:
            self.place.uncount_hedge()
        self.place.release(instruction.rejected)

    def _record_grant(self, instruction: do.RecordGrant) -> None:
        fault_point("router.granted")
        self.record.take_grant(instruction.granted)

    def _record_kv(self, instruction: do.RecordKv) -> None:
        self.record.take_ready(instruction.ready)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.remove_listener(self._on_prefill_change)
            self._watched = None

    PERFORM: ClassVar[Mapping[type, Callable[[AttemptNodes, Any], None]]] = {
        do.StartPrefill: _start_prefill,
        do.StopPrefill: _stop_prefill,
        do.ChoosePrefill: _choose_prefill,
        do.ReleasePrefill: _release_prefill,
        do.Retarget: _retarget,
        do.CancelSamples: _cancel_samples,
        do.CloseAttempt: _close,
        do.RecordGrant: _record_grant,
        do.RecordKv: _record_kv,
    }
