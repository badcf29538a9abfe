"""One try at the unfinished samples of an answer, on one decode node.

`Attempt._serve` is the story: a grant, the prompt's KV, the end. Events of samples (tokens, done)
go straight to the answer; what concerns the sequence group goes to the attempt's queue, which
`_serve` reads.

A transfer that fails is tried again whole under a new transfer id: the KV of two is never mixed. The reservation stays.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from dataclasses import replace

from google.rpc import code_pb2

from outrider.errors import InternalError, InvalidRequestError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeState
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.rpc.status import UNREACHABLE
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import traceparent_of
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
)
from router.nodes.directory import EXACT_NUMERICS
from router.nodes.link import NodeLink, PrefillLink
from router.nodes.transport import DecodeSession
from router.requests.held_tokens import HeldTokens
from router.requests.sample_answer import TokenMismatchError
from router.requests.work import Completed, Fatal, Lost, Outcome, OutcomeError, Refused, Work, describe
from router.scheduling.placement import Demand, Place

ID_BYTES = 16
PREFILL_ANSWER_SECONDS = 0.5
"""How long a finished answer waits for the prefill node's figures."""

_log = get_logger("attempts")


class _Signal(enum.Enum):
    STANDING = enum.auto()  # of a node has changed
    PREFILL_ENDED = enum.auto()


_Event = SequenceGroupEvent | _Signal


class Attempt:
    """Owns a place, a sequence group and a prefill, and frees all three. Owned by the event loop.

    It ends by itself when it has an outcome, which is set once; `end` gives it up.
    """

    def __init__(self, work: Work, place: Place, demand: Demand, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called for an outcome, the first tokens, a sample's end, and another standing of the node."""
        self.place = place
        self.outcome: Outcome | None = None
        self.has_tokens = False  # it has computed some itself
        self.hedged: NodeLink | None = None  # the late node because of which it was opened beside another one
        self.incarnation = place.decode.incarnation  # of the decode node's process
        self.numerics = place.decode.numerics
        self._work = work
        self._demand = demand
        self._on_change = on_change
        self._figures = work.figures.begin_attempt(place.decode, num_known_tokens=len(demand.token_ids))
        self._transfer_id = b"" if place.prefill is None else os.urandom(ID_BYTES)
        self._prefill_numerics = ""  # of the prefill nodes that have worked
        self._keeps_received = False  # the decode node holds what earlier transfers brought whole
        self._held = HeldTokens(work.answer, self._take_held)
        request = work.answer.request
        self._opened = OpenSequenceGroup(
            sequence_group_id=os.urandom(ID_BYTES),
            transfer_id=self._transfer_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            samples=work.answer.unfinished_samples() or (SampleStart(sample=0),),  # only the prompt is wanted
            options=replace(
                request.options,
                cache_salt=place.kv_salt(request.options.cache_salt),
                prompt_logprobs=request.options.prompt_logprobs if self._held.is_holding else None,
            ),
            traceparent=traceparent_of(self._figures.traced),
        )
        self._running = {start.sample for start in self._opened.samples}  # on the decode node
        self._events: asyncio.Queue[_Event | Outcome] = asyncio.Queue()
        self._session: DecodeSession | None = None  # None: not opened, or left
        self._prefill: asyncio.Task[PrefillFigures] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def has_exact_numerics(self) -> bool:
        """Whether another attempt on nodes of these numerics computes the same tokens."""
        prefill = self.place.prefill
        return self.numerics.startswith(EXACT_NUMERICS) and (prefill is None or prefill.numerics == self.numerics)

    @property
    def is_suspect(self) -> bool:
        return self.place.decode.is_late

    @property
    def is_leaving(self) -> bool:
        return self.place.decode.state is NodeState.DRAINING

    def start(self) -> None:
        """Opens the group. What goes wrong becomes the outcome."""
        decode = self.place.decode
        decode.add_listener(self._on_standing)
        try:
            self._session = decode.open_session()
            self._session.open_group(self._opened, self)
        except PeerLostError as error:
            self._events.put_nowait(Lost(error, "decode_lost"))
        self._task = asyncio.create_task(self._run(), name="attempt")

    def cancel_ended_samples(self) -> None:
        """Those that have ended by what the router knows."""
        samples = self._work.answer.samples
        running = () if self._held.is_holding else sorted(self._running)  # there is more to come than tokens
        ended = tuple(sample for sample in running if samples[sample].finished)
        if ended and self._session is not None:
            self._session.cancel(self._opened.sequence_group_id, ended)
        self._discard(*ended)

    async def wait_for_figures(self) -> None:
        """Frees the place, then waits a little for the prefill node's figures."""
        self._leave()
        if self._prefill is not None:
            await asyncio.wait((self._prefill,), timeout=PREFILL_ANSWER_SECONDS)
            self._take_figures(self._prefill)

    def end(self) -> None:
        """Frees everything, on the nodes too. Idempotent."""
        self._leave()
        for task in (self._task, self._prefill):
            if task is not None:
                task.cancel()

    # ------------------------------------------------------------ what nodes say

    def _on_standing(self) -> None:
        """Of the decode node, or of the prefill node while it works."""
        self._events.put_nowait(_Signal.STANDING)
        self._on_change()

    def on_event(self, event: SequenceGroupEvent) -> None:
        """Of this group. A node that breaks the protocol loses the attempt, a bug of ours the request, and no other."""
        try:
            match event:
                case _ if self._held.takes(event):
                    pass
                case SampleTokens():
                    self._take_tokens(event)
                case SampleDone():
                    self._work.answer.finish(event)
                    self._discard(event.sample)
                    self._on_change()
                case _:
                    self._events.put_nowait(event)
        except TokenMismatchError as error:
            self._give_up(Lost(self._lost(error.message), "token_mismatch"))
        except InternalError as error:
            self._give_up(Lost(self._lost(error.message), "protocol"))
        except OutriderError as error:
            self._give_up(Fatal(error))
        except Exception as error:  # noqa: BLE001 the others of this session are not to end with it
            _log.exception("an event could not be taken", request_id=self._opened.request_id, error=str(error))
            self._give_up(Fatal(InternalError(f"a decode node's event could not be taken: {error}")))

    def on_lost(self, error: OutriderError) -> None:
        """The decode node's session broke."""
        self._running.clear()
        lost = error if isinstance(error, PeerLostError) else PeerLostError(error.message)
        self._events.put_nowait(Lost(lost, "decode_lost", is_counted=not self.is_leaving))

    def _take_tokens(self, tokens: SampleTokens) -> None:
        """Raises: TokenMismatchError, InternalError; CapacityError, InvalidRequestError without memory for them."""
        fault_point("router.token")
        work, is_first = self._work, not self.has_tokens
        self.has_tokens = True
        num_new, has_ended = work.answer.take(tokens)
        self._figures.take_tokens(tokens, num_new)
        finished = work.answer.samples[tokens.sample].finished if has_ended else None
        if finished is not None and finished.stop_string is not None:  # of which the node does not know
            self.cancel_ended_samples()
        if is_first:
            self.place.decode.breaker.succeed()
        if is_first or has_ended:
            self._on_change()
        if num_new:
            work.services.answers.grow(work.account, num_new)

    def _take_held(self, events: list[SampleTokens | SampleDone]) -> None:
        """The prompt's logprobs have come, for which these have waited."""
        self.cancel_ended_samples()
        for event in events:
            if event.sample in self._running:
                self.on_event(event)

    def _discard(self, *samples: int) -> None:
        self._running.difference_update(samples)
        if samples and not self._running:
            self._events.put_nowait(Completed())

    def _give_up(self, outcome: Outcome) -> None:
        """Takes nothing more from the node."""
        if self._session is not None:
            self._session.forget(self._opened.sequence_group_id)
        self._events.put_nowait(outcome)

    # ------------------------------------------------------------ from the grant to the end

    async def _run(self) -> None:
        try:
            await self._serve()
        except OutcomeError as error:
            self.outcome = error.outcome
        except Exception as error:  # noqa: BLE001 whatever it was, the request is not to wait for it
            _log.exception("an attempt failed", node=self.place.decode.name, error=str(error))
            self.outcome = Lost(self._lost(f"the attempt failed: {error}"), "internal")
        if isinstance(self.outcome, Lost) and self.outcome.is_counted:
            self._work.blame(self.place.decode, self.outcome.cause)
        self._leave()
        if self._prefill is not None and not isinstance(self.outcome, Completed):  # else its figures may still come
            self._prefill.cancel()
        self._on_change()

    async def _serve(self) -> None:
        """Raises: OutcomeError with the outcome."""
        granted = await self._wait_for_grant("an open")
        assert granted is not None, "no KV comes before the grant"
        fault_point("router.granted")
        work = self._work
        work.answer.begin()
        next_grant: Granted | None = granted
        while next_grant is not None and next_grant.kv_address:
            if (link := self.place.prefill) and work.losses.may_transfer and await self._transfer(next_grant, link):
                break
            next_grant = await self._retarget()
        if next_grant is None and self._held.is_holding:
            raise OutcomeError(Lost(self._lost("the prompt's logprobs are lost"), "prefill_lost", is_counted=False))
        self.place.release_prefill()
        while True:
            await self._next_event()

    async def _next_event(self, deadline: float | None = None) -> _Event | None:
        """None at the deadline. Raises: OutcomeError with the outcome."""
        try:
            async with asyncio.timeout_at(deadline):
                event = await self._events.get()
        except TimeoutError:
            return None
        match event:
            case Completed() | Refused() | Lost() | Fatal():
                raise OutcomeError(event)
            case Rejected():
                self._running.clear()
                raise OutcomeError(Refused(event))
            case SequenceGroupFailed():
                self._running.clear()
                if event.code == code_pb2.INVALID_ARGUMENT:
                    sampling = self._work.answer.request.options.sampling
                    raise OutcomeError(Fatal(InvalidRequestError(event.message, field=sampling.field_to_blame)))
                raise OutcomeError(Lost(self._lost(event.message), "group_failed"))
        if isinstance(event, KvReady):
            self._figures.take_ready(event)
        return event

    async def _wait_for_grant(self, command: str) -> Granted | None:
        """For the transfer at hand. None: the KV was ready, of a transfer that had been given up."""
        deadline = asyncio.get_running_loop().time() + self._work.services.config.open_timeout_seconds
        asked = self._figures.ask("" if self._prefill is None else "for another transfer")
        while True:
            match await self._next_event(deadline):
                case None:
                    raise OutcomeError(Lost(self._lost(f"does not answer {command}"), "decode_silent"))
                case Granted() as granted if granted.transfer_id == self._transfer_id:
                    asked.close()
                    self._figures.take_grant(granted)
                    return granted
                case Granted() if self._figures.num_tokens_to_compute is None:
                    raise OutcomeError(Lost(self._lost("a grant names another transfer"), "protocol"))
                case KvReady():
                    asked.close()
                    return None

    async def _transfer(self, granted: Granted, link: PrefillLink) -> bool:
        """Whether the KV is ready. Raises: OutcomeError when the request has lost too many nodes."""
        incarnation, self._prefill_numerics = link.incarnation, link.numerics
        error = await self._try_transfer(granted, link)
        if error is None:
            return True
        losses = self._work.losses
        losses.add_transfer(incarnation)
        if error.reason == UNREACHABLE:
            losses.add_node(incarnation)
        self._work.blame(link, error.reason)
        if losses.final_error(error) is not None or self._figures.kv_ready is not None:  # then logprobs are lost
            raise OutcomeError(Lost(error, "prefill_lost", is_counted=False))
        self._work.note_move(link, "prefill_lost", error)
        return False

    async def _try_transfer(self, granted: Granted, link: PrefillLink) -> PeerLostError | None:
        """None once KV and wanted logprobs are here, else what was lost; nothing of a failed transfer goes on."""
        span = self._figures.begin_prefill(link)
        call = PrefillCall.of_grant(
            granted,
            self._opened,
            decode_incarnation=self.incarnation,
            fingerprint=self._work.served.info.fingerprint,
            may_read_held=self._keeps_received,
            traceparent=traceparent_of(span.traced),
        )
        prefill = self._prefill = asyncio.create_task(link.prefill(call), name="prefill")
        prefill.add_done_callback(lambda _task: self._events.put_nowait(_Signal.PREFILL_ENDED))
        prefill.add_done_callback(lambda task: self._figures.end_prefill(span, task))
        link.add_listener(self._on_standing)
        is_ready = False
        timeout_seconds = self._work.services.config.kv_ready_timeout_seconds
        deadline: float | None = None
        try:
            while not is_ready or (self._held.is_holding and not prefill.done()):
                match await self._next_event(deadline):
                    case KvReady():
                        is_ready = True
                        prefill.add_done_callback(self._take_figures)
                        deadline = asyncio.get_running_loop().time() + timeout_seconds  # for its answer
                    case KvFailed(transfer_id=self._transfer_id, message=message):
                        return PeerLostError(f"the KV transfer from {link.name} failed: {message}", node=link.name)
                    case _Signal.PREFILL_ENDED if prefill.done() and not is_ready:
                        if isinstance(error := prefill.exception(), PeerLostError):
                            return error
                        prefill.result()
                        # The push was committed: the decode node's word follows.
                        deadline = asyncio.get_running_loop().time() + timeout_seconds
                    case _Signal.STANDING if self._work.services.placement.replaces(link):
                        return PeerLostError(f"prefill node {link.name} is late", node=link.name)
                    case None:
                        message = f"the prompt's KV or its logprobs did not arrive from {link.name}"
                        return PeerLostError(message, node=link.name)
            return self._held.take_answer(prefill)
        finally:
            link.remove_listener(self._on_standing)
            if not is_ready and not prefill.done():
                prefill.cancel()
                await asyncio.wait((prefill,))

    async def _retarget(self) -> Granted | None:
        """The grant for another try; None when the KV was ready after all."""
        losses = self._work.losses
        demand = replace(self._demand, avoided=frozenset(losses.avoided))
        has_node = losses.may_transfer and self.place.change_prefill(demand)
        self._transfer_id = os.urandom(ID_BYTES) if has_node else b""
        prefill = self.place.prefill if has_node else None
        is_alike = self._prefill_numerics == (prefill.numerics if prefill else self.numerics)
        self._keeps_received = is_alike and not self._held.is_holding  # else another node computes only the rest
        command = RetargetSequenceGroup(
            sequence_group_id=self._opened.sequence_group_id,
            transfer_id=self._transfer_id,
            keeps_received=self._keeps_received,
        )
        if self._session is not None:
            self._session.retarget(command)
        return await self._wait_for_grant("a retarget")

    def _take_figures(self, prefill: asyncio.Task[PrefillFigures]) -> None:
        if prefill.done() and not prefill.cancelled() and prefill.exception() is None:
            self._figures.prefill = prefill.result()

    def _leave(self) -> None:
        """Frees the group on the decode node, unless it has ended there, and the place."""
        has_ended = self.outcome is None and not self._running  # its samples have, and it has not been told yet
        self._figures.end("" if has_ended else describe(self.outcome))
        session, self._session = self._session, None
        if session is not None:
            session.forget(self._opened.sequence_group_id)
            if self._running:
                session.cancel(self._opened.sequence_group_id)
        self.place.decode.remove_listener(self._on_standing)
        rejected = self.outcome.rejected if isinstance(self.outcome, Refused) else None
        has_no_room = rejected is not None and rejected.reason in (RejectReason.NO_ROOM, RejectReason.DRAINING)
        self.place.release(rejected if has_no_room else None)

    def _lost(self, message: str) -> PeerLostError:
        return PeerLostError(f"decode node {self.place.decode.name}: {message}", node=self.place.decode.name)
