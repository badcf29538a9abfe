"""One try at the unfinished samples of an answer, on one decode node: its sequence group, its hand-off, its outcome."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from google.rpc import code_pb2

from outrider.errors import InternalError, InvalidRequestError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeState
from outrider.service.telemetry.logging import get_logger
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    RejectReason,
    SampleDone,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
)
from router.answer import Answer
from router.hand_off import ID_BYTES, HandOff
from router.hedge_budget import HedgeBudget
from router.node_link import NodeLink
from router.placement import Demand, Place
from router.request_record import AttemptFigures
from router.sample_answer import TokenMismatchError
from router.sessions import DecodeSession

_log = get_logger("attempts")


@dataclass(frozen=True, slots=True)
class Completed:
    """Every sample that was opened has ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node keeps nothing of it."""

    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Lost:
    """The work is gone, or must not go on where it was; what the answer has is kept."""

    error: PeerLostError
    cause: str  # one word, for metrics


@dataclass(frozen=True, slots=True)
class Fatal:
    """No other node would do better."""

    error: OutriderError


Outcome = Completed | Refused | Lost | Fatal


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettings:
    """What all attempts of a request share."""

    fingerprint: str
    stop_token_ids: tuple[int, ...]
    open_timeout_seconds: float
    kv_ready_timeout_seconds: float
    hedges: HedgeBudget


class AttemptListener:
    """Told what happens, on the event loop; must not raise. (`router.request_flow.RequestFlow`.)"""

    def on_granted(self, attempt: Attempt, granted: Granted) -> None: ...

    def on_tokens(self, attempt: Attempt, tokens: SampleTokens) -> None:
        """Raises: TokenMismatchError, InternalError for tokens that do not continue the answer."""

    def on_done(self, attempt: Attempt, done: SampleDone) -> None:
        """Raises: InternalError."""

    def on_prefill(self, attempt: Attempt) -> None:
        """A prefill node begins with the prompt."""

    def on_prefill_moved(self, attempt: Attempt, error: PeerLostError) -> None: ...

    def on_attempt_changed(self) -> None:
        """An outcome, or another standing of the node."""


class Attempt:
    """Owns a place, a sequence group and a hand-off, and frees all three. Owned by the event loop.

    It ends by itself when it has an outcome, which is set once; `end` gives it up.
    """

    def __init__(
        self,
        *,
        place: Place,
        demand: Demand,
        answer: Answer,
        settings: AttemptSettings,
        listener: AttemptListener,
    ) -> None:
        self.place = place
        self.outcome: Outcome | None = None
        self.has_tokens = False  # it has computed some itself
        self.hedged: NodeLink | None = None  # the late node because of which it was opened beside another one
        self.is_granted = False
        self.figures = AttemptFigures(num_known_tokens=len(demand.token_ids))
        self._demand = demand
        self._settings = settings
        self._listener = listener
        request = answer.request
        self._opened = OpenSequenceGroup(
            sequence_group_id=os.urandom(ID_BYTES),
            transfer_id=os.urandom(ID_BYTES),
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            samples=answer.unfinished_samples(),
            sampling=request.sampling,
            stop_token_ids=settings.stop_token_ids,
            logprobs=request.output.logprobs,
            num_speculative_tokens=request.num_speculative_tokens,
            verification_method=request.verification_method,
            priority=request.priority,
            cache_salt=place.kv_salt(request.cache_salt),
        )
        self._running = {start.sample for start in self._opened.samples}  # on the decode node
        self._session: DecodeSession | None = None  # None: not opened, or left
        self._timer: asyncio.TimerHandle | None = None  # for the node's answer to Open
        self._hand_off: HandOff | None = None
        self._hand_off_task: asyncio.Task[None] | None = None
        self._incarnation = place.decode.incarnation

    @property
    def numerics(self) -> str:
        return self.place.decode.numerics

    @property
    def incarnation(self) -> bytes:
        """Of the decode node's process."""
        return self._incarnation

    @property
    def is_suspect(self) -> bool:
        """The node's progress is overdue."""
        return self.place.decode.is_late

    @property
    def is_leaving(self) -> bool:
        """The node drains: it goes on, and the work should move."""
        return self.place.decode.state is NodeState.DRAINING

    def start(self) -> None:
        """Opens the group. What goes wrong becomes the outcome."""
        decode = self.place.decode
        decode.add_listener(self)
        try:
            self._session = decode.open_session()
            self._session.open_group(self._opened, self)
        except PeerLostError as error:
            self._finish(Lost(error, "decode_lost"))
            return
        late = PeerLostError(f"decode node {decode.name} does not answer", node=decode.name)
        loop = asyncio.get_running_loop()
        timeout = self._settings.open_timeout_seconds
        self._timer = loop.call_later(timeout, self._finish, Lost(late, "decode_silent"))

    def cancel_sample(self, sample: int) -> None:
        """It has ended by what the router knows."""
        if sample in self._running:
            self._running.discard(sample)
            if self._session is not None:
                self._session.cancel(self._opened.sequence_group_id, (sample,))
            self._finish_if_done()

    async def wait_for_figures(self) -> None:
        """Frees the place, then waits a little for the prefill node's figures."""
        self._leave()
        if self._hand_off is not None:
            await self._hand_off.wait_for_figures()

    def end(self) -> None:
        """Frees everything, on the nodes too. Idempotent."""
        self._leave()
        if self._hand_off_task is not None:
            self._hand_off_task.cancel()
        if self._hand_off is not None:
            self._hand_off.close()

    # ------------------------------------------------------------ what nodes say

    def on_standing(self) -> None:
        """Of the decode node."""
        self._listener.on_attempt_changed()

    def on_event(self, event: SequenceGroupEvent) -> None:
        """Of this group. A node that breaks the protocol loses the attempt, a bug of ours the request, and no other."""
        try:
            match event:
                case SampleTokens():
                    self.has_tokens = self.figures.has_tokens = True
                    self._listener.on_tokens(self, event)
                case SampleDone():
                    self._running.discard(event.sample)
                    self._listener.on_done(self, event)
                    self._finish_if_done()
                case Granted():
                    self._take_grant(event)
                case Rejected():
                    self._running.clear()
                    self._finish(Refused(event))
                case KvReady():
                    self.figures.kv_ready = event
                    if self._hand_off is not None:
                        self._hand_off.on_kv_ready(event)
                case KvFailed():
                    if self._hand_off is not None:
                        self._hand_off.on_kv_failed(event)
                case SequenceGroupFailed():
                    self._running.clear()
                    self._finish(self._outcome_of(event))
        except TokenMismatchError as error:
            self._finish(Lost(self._lost(error.message), "token_mismatch"))
        except InternalError as error:
            self._finish(Lost(self._lost(error.message), "protocol"))
        except Exception as error:  # noqa: BLE001 the others of this session are not to end with it
            _log.exception("an event could not be taken", request_id=self._opened.request_id, error=str(error))
            self._finish(Fatal(InternalError(f"a decode node's event could not be taken: {error}")))

    def on_lost(self, error: OutriderError) -> None:
        """The decode node's session broke."""
        self._running.clear()
        lost = error if isinstance(error, PeerLostError) else PeerLostError(error.message)
        self._finish(Lost(lost, "decode_lost"))

    def _take_grant(self, granted: Granted) -> None:
        fault_point("router.granted")
        if self.is_granted:
            if self._hand_off is not None:
                self._hand_off.on_granted(granted)
            return
        if granted.transfer_id != self._opened.transfer_id:
            raise InternalError("a grant names another transfer")
        self.is_granted = True
        self._stop_timer()
        self.figures.num_tokens_to_compute = granted.num_tokens_to_compute
        self._listener.on_granted(self, granted)
        if self._session is None:  # ended by what the listener made of it
            return
        self._hand_off = HandOff(
            opened=self._opened,
            demand=self._demand,
            place=self.place,
            session=self._session,
            figures=self.figures,
            fingerprint=self._settings.fingerprint,
            open_timeout_seconds=self._settings.open_timeout_seconds,
            kv_ready_timeout_seconds=self._settings.kv_ready_timeout_seconds,
            hedges=self._settings.hedges,
            on_prefill=lambda: self._listener.on_prefill(self),
            on_moved=lambda error: self._listener.on_prefill_moved(self, error),
        )
        self._hand_off_task = asyncio.create_task(self._run_hand_off(self._hand_off, granted), name="hand-off")

    async def _run_hand_off(self, hand_off: HandOff, granted: Granted) -> None:
        try:
            await hand_off.run(granted)
        except PeerLostError as error:
            self._finish(Lost(error, "decode_silent"))
        except Exception as error:  # noqa: BLE001 whatever it was, the request is not to wait for it
            _log.exception("a hand-off failed", node=self.place.decode.name, error=str(error))
            self._finish(Lost(self._lost(f"the hand-off failed: {error}"), "hand_off"))

    # ------------------------------------------------------------ the end

    def _finish_if_done(self) -> None:
        if not self._running:
            self._finish(Completed())

    def _finish(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if isinstance(outcome, Completed):
            self._leave()  # the prefill node's figures may still come
        else:
            self.end()
        self._listener.on_attempt_changed()

    def _leave(self) -> None:
        """Frees the group on the decode node, unless it has ended there, and the place."""
        self._stop_timer()
        session, self._session = self._session, None
        if session is not None:
            session.forget(self._opened.sequence_group_id)
            if self._running:
                session.cancel(self._opened.sequence_group_id)
        self.place.decode.remove_listener(self)
        rejected = self.outcome.rejected if isinstance(self.outcome, Refused) else None
        has_no_room = rejected is not None and rejected.reason in (RejectReason.NO_ROOM, RejectReason.DRAINING)
        self.place.release(rejected if has_no_room else None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _outcome_of(self, failed: SequenceGroupFailed) -> Outcome:
        if failed.code == code_pb2.INVALID_ARGUMENT:
            return Fatal(InvalidRequestError(failed.message, field="prompt"))
        return Lost(self._lost(failed.message), "group_failed")

    def _lost(self, message: str) -> PeerLostError:
        name = self.place.decode.name
        return PeerLostError(f"decode node {name}: {message}", node=name)
