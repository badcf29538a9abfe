"""Performs the instructions of a request's machine, which itself has no tasks, no timers, and no access to nodes."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from outrider.errors import InternalError, OutriderError
from outrider.faults import fault_point
from outrider.node import ModelInfo, NodeRole
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.service.telemetry.tracing import traceparent_of
from outrider.v1 import router_pb2
from router.config import RouterConfig
from router.nodes.breaker import Breaker
from router.nodes.link import NodeLink
from router.observe.record import RequestRecord
from router.observe.records import Records, finish
from router.observe.spans import SpanKind
from router.requests import events as on
from router.requests import instructions as do
from router.requests.answer import Answer
from router.requests.answer_budget import AnswerAccount, AnswerBudget, Unread
from router.requests.attempt_nodes import AttemptNodes, node_of
from router.requests.machine import Request
from router.requests.states import Limits
from router.scheduling.placement import Place, Placement
from router.scheduling.request_queue import QueuedRequest, RequestQueue

ID_BYTES = 16
"""Length of the ids of sequence groups and transfers, in bytes."""

_log = get_logger("requests")


class ReceiptQueue(Protocol):
    """The queue of receipts of ended requests (`router.durability.receipts.keeper.ReceiptKeeper`)."""

    def keep(
        self, proto: router_pb2.GenerateRequest, answer: Answer, record: RequestRecord, model: ModelInfo
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """The context shared by a router's requests, made by `router.router.Router` once a node serves."""

    config: RouterConfig
    queue: RequestQueue
    placement: Placement
    answers: AnswerBudget
    metrics: RouterMetrics
    records: Records
    router_address: str
    receipts: ReceiptQueue | None  # None: the setting `router.receipts` is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """An encoded request with its answer, record and memory account."""

    answer: Answer
    record: RequestRecord
    account: AnswerAccount  # closed when the request is closed
    proto: router_pb2.GenerateRequest | None  # the request as the client sent it; None: its receipt has been made
    model: ModelInfo
    client: str  # the client whose share of the queue is charged
    was_admitted: bool = False  # whether a router that is gone admitted the request; the queue must not reject it then


class Driver:
    """Feeds events to one request's machine, one at a time, and performs its instructions. Owned by the event loop."""

    def __init__(
        self, key: str, context: RouterContext, *, window_seconds: float | None, on_free: Callable[[], None]
    ) -> None:
        """Starts in the state ENCODING. `on_free` is called once the request's key is free."""
        config = context.config
        limits = Limits(
            window_seconds=window_seconds,
            open_timeout_seconds=config.open_timeout_seconds,
            kv_ready_timeout_seconds=config.kv_ready_timeout_seconds,
            new_id=lambda: os.urandom(ID_BYTES),
        )
        self.request = Request(limits, context.placement)
        self._key = key
        self._context = context
        self._on_free = on_free
        self._encoded: EncodedRequest | None = None  # None while the request is being encoded
        self._events: deque[on.Event] = deque()
        self._is_stepping = False
        self._now = 0.0  # monotonic seconds of the current step
        self._attempts: dict[bytes, AttemptNodes] = {}  # by sequence group id; kept until nothing of the attempt runs
        self._waiting: QueuedRequest | None = None  # the request's turn, kept while an attempt runs; None: never queued
        self._seeking: asyncio.Task[Place] | None = None
        self._timers: dict[tuple[on.Timer, bytes], asyncio.TimerHandle] = {}
        self._blamed: dict[bytes, Breaker] = {}  # by incarnation: nodes whose failure the request may have caused

    @property
    def encoded(self) -> EncodedRequest:
        assert self._encoded is not None, "the request has been encoded"
        return self._encoded

    def begin(self, encoded: EncodedRequest) -> None:
        """Starts serving the encoded request."""
        self._encoded = encoded
        self.feed(on.Encoded(encoded.answer, encoded.was_admitted))

    # ------------------------------------------------------------ stepping the machine

    def feed(self, event: on.Event) -> None:
        """Steps the machine and performs its instructions. Events caused meanwhile are queued. Never raises."""
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._is_stepping = False

    def _step(self, event: on.Event) -> None:
        """Takes one event. An internal error ends only this request, and everything that the request holds is freed."""
        request, now = self.request, time.monotonic()
        self._now = now
        try:
            instructions = request.step(event, now)
        except Exception as error:  # noqa: BLE001 it ends this request only
            _log.exception(
                "a request failed", request_id=self._key, state=request.state.name, kind=type(event).__name__
            )
            self._crash(error)
            return
        failure: Exception | None = None
        for instruction in instructions:
            try:
                self._PERFORM[type(instruction)](self, instruction)
            except Exception as error:  # noqa: BLE001 the other instructions still have to be performed
                name = type(instruction).__name__
                _log.exception("a request failed", request_id=self._key, state=request.state.name, instruction=name)
                failure = error
                if isinstance(instruction, do.Summarize):
                    self._fail(error)  # first, because the next instruction counts how the request ended
        instructions.clear()
        if failure is not None:
            self._crash(failure)

    def _crash(self, cause: Exception) -> None:
        for instruction in self.request.crash(self._fail(cause), self._now):
            try:
                self._PERFORM[type(instruction)](self, instruction)
            except Exception as failure:  # noqa: BLE001 the rest still has to be freed
                _log.exception("a request could not be freed", request_id=self._key, error=str(failure))

    def _fail(self, cause: Exception) -> InternalError:
        """Fails the answer, unless it has ended. Returns the error."""
        message = cause.message if isinstance(cause, InternalError) else f"{type(cause).__name__}: {cause}"
        error = InternalError(f"the request failed: {message}")
        if self._encoded is not None:
            self._encoded.answer.fail(error)
        return error

    # ------------------------------------------------------------ instructions: places

    def _enqueue(self, wanted: do.Enqueue) -> None:
        if self._waiting is None:
            priority = self.encoded.answer.request.options.priority
            self._waiting = QueuedRequest(wanted.demand, priority=priority, client=self.encoded.client)
        waiting = self._waiting
        if wanted.demand != waiting.demand:  # an equal demand is not replaced, because it has cached hashes
            waiting.demand = wanted.demand
        waiting.bypasses_limits |= wanted.bypasses_limits
        waiting.was_placed = wanted.is_undisplaceable
        waited = self.encoded.record.begin_span(SpanKind.QUEUE)

        def end(task: asyncio.Task[Place]) -> None:
            waited.close()
            if self._seeking is task:
                self._seeking = None
                self.feed(self._placed(task))
            elif not task.cancelled() and task.exception() is None:
                task.result().release()  # a place assigned in the same loop iteration in which the wait was cancelled

        self._seeking = asyncio.create_task(self._context.queue.wait_for_place(waiting), name="place")
        self._seeking.add_done_callback(end)

    def _placed(self, task: asyncio.Task[Place]) -> on.Placed | on.NotPlaced:
        if task.cancelled():
            return on.NotPlaced(InternalError("the search for a place was cancelled"))
        if (error := task.exception()) is not None:
            return on.NotPlaced(
                error if isinstance(error, OutriderError) else InternalError(f"the queue failed: {error}")
            )
        return self._offer(task.result())

    def _offer(self, place: Place) -> on.Placed:
        return on.Placed(
            place,
            node_of(place.decode),
            None if place.prefill is None else node_of(place.prefill),
            kv_salt=place.kv_salt(self.encoded.answer.request.options.cache_salt),
            is_hedge=place.hedged is not None,
        )

    def _change_demand(self, wanted: do.ChangeDemand) -> None:
        assert self._waiting is not None, "the request is in the queue"
        self._context.queue.change_demand(self._waiting, wanted.demand)

    def _leave_queue(self, _instruction: do.LeaveQueue) -> None:
        task, self._seeking = self._seeking, None
        if task is not None:
            task.cancel()

    def _hedge(self, wanted: do.Hedge) -> None:
        placement, late = self._context.placement, self._attempts[wanted.late_group_id].place.decode
        place = placement.place(wanted.demand, must_be_on_time=True) if placement.may_hedge(late) else None
        if place is None:
            self.feed(on.NotPlaced())
            return
        place.hedged = late
        late.num_hedges += 1
        self._context.metrics.add_hedge()
        self.feed(self._offer(place))

    def _return_place(self, unwanted: do.ReturnPlace) -> None:
        place: Place = unwanted.place
        place.uncount_hedge()
        place.release()

    # ------------------------------------------------------------ instructions: nodes

    def _open_group(self, wanted: do.OpenGroup) -> None:
        fault_point("router.admitted")
        place: Place = wanted.place
        num_known_tokens = len(wanted.command.known_token_ids(wanted.command.samples[0]))
        record = self.encoded.record.begin_attempt(place.decode, num_known_tokens=num_known_tokens)
        command = replace(wanted.command, traceparent=traceparent_of(record.traced))
        nodes = AttemptNodes(
            command,
            place,
            record,
            self.feed,
            fingerprint=self.encoded.model.fingerprint,
            may_take_over=self._context.placement.may_take_over,
        )
        self._attempts[nodes.id] = nodes
        nodes.open()

    def _perform_on_nodes(self, instruction: do.AttemptInstruction) -> None:
        """Performs an instruction about an attempt's nodes, and forgets the attempt if it holds nothing any more."""
        nodes = self._attempts[instruction.sequence_group_id]
        try:
            nodes.perform(instruction)
        finally:
            if nodes.is_closed and not nodes.is_prefill_running:
                del self._attempts[nodes.id]

    def _blame(self, instruction: do.Blame) -> None:
        place = self._attempts[instruction.sequence_group_id].place
        link: NodeLink | None = place.decode if instruction.role is NodeRole.DECODE else place.prefill
        assert link is not None, "the attempt has the node that failed it"
        if instruction.may_be_request:
            self._blamed[instruction.incarnation] = link.breaker
            link.breaker.fail(self)
        else:
            link.breaker.fail()

    def _forgive(self, instruction: do.Forgive) -> None:
        for incarnation in instruction.incarnations:
            self._blamed[incarnation].forgive(self)

    # ------------------------------------------------------------ instructions: timers, tokens, ends

    def _set_timer(self, wanted: do.SetTimer) -> None:
        timer, group_id = wanted.timer, wanted.sequence_group_id
        if timer is on.Timer.WINDOW and (
            self.encoded.account.unread is None or self.encoded.account.unread[0] is not Unread.DELIVERED
        ):
            self.encoded.account.unread = Unread.LEFT, self._context.answers.clock()
        if (old := self._timers.pop((timer, group_id), None)) is not None:
            old.cancel()
        delay = max(wanted.at - self._now, 0.0)
        self._timers[timer, group_id] = asyncio.get_running_loop().call_later(delay, self._fire, timer, group_id)

    def _fire(self, timer: on.Timer, group_id: bytes) -> None:
        del self._timers[timer, group_id]
        self.feed(on.TimerFired(timer, group_id))

    def _stop_timer(self, instruction: do.StopTimer) -> None:
        self._timers.pop((instruction.timer, instruction.sequence_group_id)).cancel()

    def _deliver(self, delivered: do.Deliver) -> None:
        tokens, num_new = delivered.tokens, delivered.num_new
        nodes = self._attempts[tokens.sequence_group_id]
        nodes.record.take_tokens(tokens, num_new, self._now)
        if delivered.is_first:
            nodes.place.decode.breaker.succeed()
        if num_new:
            try:
                self._context.answers.grow(self.encoded.account, num_new)
            except OutriderError as error:
                self.feed(on.Failed(error))

    def _record_migration(self, instruction: do.RecordMigration) -> None:
        self.encoded.record.add_move(instruction.cause, node=instruction.node, error=instruction.error)

    def _record_end(self, _instruction: do.RecordEnd) -> None:
        fault_point("router.before_finish")
        self.encoded.record.mark_end()

    def _summarize(self, _instruction: do.Summarize) -> None:
        samples = self.encoded.answer.samples
        ended = [sample.finished for sample in samples if sample.finished]
        summary = finish(
            self.encoded.record, ended, num_longest=max((sample.num_tokens for sample in samples), default=0)
        )
        metrics = summary.metrics
        self._context.queue.observe_service(max(metrics.e2e_seconds - metrics.queue_seconds, 0.0))
        self.encoded.answer.close(summary)

    def _settle(self, _instruction: do.SettleRequest) -> None:
        encoded, context = self.encoded, self._context
        answer, record = encoded.answer, encoded.record
        if context.receipts is not None and encoded.proto is not None:
            context.receipts.keep(encoded.proto, answer, record, encoded.model)
        self._encoded = replace(encoded, proto=None)  # the proto may be large, and is not needed any more
        num_tokens = None if answer.summary is None else answer.num_generated_tokens / len(answer.samples)
        context.answers.settle(encoded.account, num_tokens)
        record.close(answer.failure)
        context.records.end(record, answer.failure)
        self._attempts = {group_id: nodes for group_id, nodes in self._attempts.items() if not nodes.is_closed}

    def _free_key(self, instruction: do.FreeKey) -> None:
        if self._encoded is not None:
            self._context.answers.close(self._encoded.account)
        if instruction.has_client_left:
            _log.info("client left", request_id=self._key)
        self._on_free()

    _PERFORM: ClassVar[Mapping[type, Callable[[Driver, Any], None]]] = {
        do.Enqueue: _enqueue,
        do.ChangeDemand: _change_demand,
        do.LeaveQueue: _leave_queue,
        do.Hedge: _hedge,
        do.ReturnPlace: _return_place,
        do.OpenGroup: _open_group,
        do.Blame: _blame,
        do.Forgive: _forgive,
        do.SetTimer: _set_timer,
        do.StopTimer: _stop_timer,
        do.Deliver: _deliver,
        do.RecordMigration: _record_migration,
        do.RecordEnd: _record_end,
        do.Summarize: _summarize,
        do.SettleRequest: _settle,
        do.FreeKey: _free_key,
        **dict.fromkeys(AttemptNodes.PERFORM, _perform_on_nodes),
    }
