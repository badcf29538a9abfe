"""One request on one decode node: its sequence group, its hand-off, its events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import grpc
from google.rpc import code_pb2

from outrider.errors import (
    AbortedError,
    CapacityError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    PeerLostError,
)
from outrider.request import FinishReason, Request
from outrider.rpc.status import from_rpc_error
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
)
from outrider.v1 import prefill_pb2
from router.journal import Journal
from router.placement import Place
from router.request_record import RequestRecord
from router.sessions import DecodeSession

_ID_BYTES = 16
PREFILL_ANSWER_SECONDS = 0.5
"""How long a finished answer waits for the prefill node's figures."""


class Attempt:
    """Owns a place, a sequence group and at most one Prefill call, and frees all three.

    Events go into the journal as they come, whatever the client's pace; `wake` tells the
    request's writer that there is something new, a failure included. Owned by the event
    loop.
    """

    def __init__(
        self,
        *,
        place: Place,
        journal: Journal,
        record: RequestRecord,
        metrics: RouterMetrics,
        wake: Callable[[], None],
    ) -> None:
        self.place = place
        self._journal = journal
        self._record = record
        self._metrics = metrics
        self._wake = wake
        self._group_id = os.urandom(_ID_BYTES)
        self._transfer_id = os.urandom(_ID_BYTES)
        self._session: DecodeSession | None = None  # None: not opened, or left
        self._answer: asyncio.Future[Granted | Rejected] = asyncio.get_running_loop().create_future()
        self._prefill: asyncio.Task[None] | None = None
        self._kv_timer: asyncio.TimerHandle | None = None
        self._running_samples = set(range(record.request.sampling.n))  # on the decode node
        self._last_tokens_at: dict[int, float] = {}
        self.failure: OutriderError | None = None

    async def open(self, *, stop_token_ids: tuple[int, ...], timeout_seconds: float) -> Granted | Rejected:
        """Opens the group and gives the decode node's answer. Raises: OutriderError when the node is lost."""
        request, decode = self._record.request, self.place.decode
        self._session = decode.open_session()
        command = _open_command(request, self._group_id, self._transfer_id, stop_token_ids)
        self._session.open_group(command, self)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._answer
        except TimeoutError as error:
            raise PeerLostError(f"decode node {decode.name} does not answer", node=decode.name) from error

    def start_prefill(self, granted: Granted, *, fingerprint: str, kv_ready_timeout_seconds: float) -> None:
        """Has the prompt computed where that is a prefill node's work."""
        if not granted.kv_address:
            self.place.release_prefill()
            return
        link = self.place.prefill
        self._record.use_node(link.name, link.numerics)
        link.add_listener(self)
        decode_info = self.place.decode.info
        assert decode_info is not None, "a node with a session has said who it is"
        token_ids = self._record.request.prompt_token_ids + self._record.request.generated_token_ids
        call = prefill_pb2.PrefillRequest(
            sequence_group_id=self._group_id,
            transfer_id=self._transfer_id,
            request_id=self._record.request.request_id,
            token_ids=token_ids[: len(token_ids) - granted.num_tokens_to_compute],
            kv_address=granted.kv_address,
            decode_incarnation=decode_info.incarnation,
            held_prefix_length=granted.held_prefix_length,
            priority=self._record.request.priority,
            fingerprint=fingerprint,
        )
        self._prefill = asyncio.create_task(self._run_prefill(call, kv_ready_timeout_seconds), name="prefill")

    async def wait_for_prefill_answer(self) -> None:
        """The prefill node's figures come about when the KV does; a short answer may be there before them."""
        if self._prefill is not None:
            await asyncio.wait((self._prefill,), timeout=PREFILL_ANSWER_SECONDS)

    def leave(self, *, was_refused: bool = False) -> None:
        """Frees the group on the decode node, unless it has ended there, and the place. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.forget(self._group_id)
            if self._running_samples:
                session.cancel(self._group_id)
        self.place.release(is_full=was_refused)

    def close(self) -> None:
        """Frees everything, the Prefill call included. Idempotent."""
        self.leave()
        self._stop_watching_prefill()
        if self._prefill is not None:
            self._prefill.cancel()
        if not self._answer.done():
            self._answer.set_exception(AbortedError("the attempt was given up"))
        if not self._answer.cancelled():
            self._answer.exception()  # seen: nobody may be waiting for it any more

    # ------------------------------------------------------------ what nodes say

    def on_event(self, event: SequenceGroupEvent) -> None:
        try:
            match event:
                case SampleTokens():
                    self._take_tokens(event)
                case SampleDone():
                    self._take_done(event)
                case Granted() | Rejected():
                    self._take_answer(event)
                case KvReady():
                    self._take_kv_ready(event)
                case KvFailed():
                    self.fail(PeerLostError(event.message, node=self.place.prefill.name))
                case SequenceGroupFailed():
                    self._running_samples.clear()
                    self.fail(_error_of(event, self.place.decode.name))
        except InternalError as error:
            self.fail(error)

    def on_lost(self, error: OutriderError) -> None:
        """The decode node's session broke, or the prefill node is gone."""
        self.fail(error if isinstance(error, PeerLostError) else PeerLostError(error.message))

    def fail(self, error: OutriderError) -> None:
        """Ends the attempt; the first reason counts."""
        if self.failure is None and not self._journal.is_finished:
            self.failure = error
            if not self._answer.done():
                self._answer.set_exception(error)
            self.close()
        self._wake()

    def _take_answer(self, answer: Granted | Rejected) -> None:
        if isinstance(answer, Rejected):
            self._running_samples.clear()
        elif answer.transfer_id != self._transfer_id:
            raise InternalError("a grant names another transfer")
        else:
            self._record.mark_admitted()
        if not self._answer.done():
            self._answer.set_result(answer)

    def _take_tokens(self, tokens: SampleTokens) -> None:
        now = self._record.clock()
        if self._record.first_token_at is None:
            self._record.first_token_at = now
            self._metrics.observe_first_token(now - self._record.arrived_at)
        num_taken, has_ended = self._journal.append(tokens)
        self._record.speculation.add(tokens.speculation)
        last = self._last_tokens_at.get(tokens.sample)
        self._metrics.observe_tokens(num_tokens=num_taken, seconds_since_last=None if last is None else now - last)
        self._last_tokens_at[tokens.sample] = now
        if has_ended:
            self._take_end(tokens.sample)
        self._wake()

    def _take_end(self, sample: int) -> None:
        """A sample ended by what the router saw; only a stop string is news to the decode node."""
        finished = self._journal.samples[sample].finished
        if finished is not None and finished.stop_string is not None:
            self._running_samples.discard(sample)
            if self._session is not None:
                self._session.cancel(self._group_id, (sample,))
        self._take_possible_end()

    def _take_done(self, done: SampleDone) -> None:
        self._running_samples.discard(done.sample)
        if done.reason is FinishReason.ABORTED:
            raise InternalError("a decode node aborted a sample by itself")
        self._journal.finish(done)
        self._take_possible_end()
        self._wake()

    def _take_possible_end(self) -> None:
        if self._journal.is_finished:
            self._record.mark_end()
            if not self._running_samples:
                self.leave()

    def _take_kv_ready(self, ready: KvReady) -> None:
        if ready.transfer_id != self._transfer_id:
            raise InternalError("KV of another transfer is ready")
        self._record.kv_ready = ready
        self.place.release_prefill()
        self._stop_watching_prefill()

    # ------------------------------------------------------------ the hand-off

    async def _run_prefill(self, call: prefill_pb2.PrefillRequest, kv_ready_timeout_seconds: float) -> None:
        name = self.place.prefill.name
        try:
            self._record.prefill = await self.place.prefill.prefill_stub().Prefill(call)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error, target=name)
            if self._record.kv_ready is None:
                self.fail(PeerLostError(f"prefill node {name} failed: {error.message}", node=name))
            return
        if self._record.kv_ready is None and self._session is not None:
            late = PeerLostError(f"the prompt's KV did not arrive from {name}", node=name)
            loop = asyncio.get_running_loop()
            self._kv_timer = loop.call_later(kv_ready_timeout_seconds, self.fail, late)

    def _stop_watching_prefill(self) -> None:
        self.place.prefill.remove_listener(self)
        if self._kv_timer is not None:
            self._kv_timer.cancel()
            self._kv_timer = None


def _open_command(
    request: Request, group_id: bytes, transfer_id: bytes, stop_token_ids: tuple[int, ...]
) -> OpenSequenceGroup:
    return OpenSequenceGroup(
        sequence_group_id=group_id,
        transfer_id=transfer_id,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        samples=tuple(SampleStart(sample, request.generated_token_ids) for sample in range(request.sampling.n)),
        stop_token_ids=stop_token_ids,
        logprobs=request.output.logprobs,
        num_speculative_tokens=request.num_speculative_tokens,
        priority=request.priority,
    )


def _error_of(failed: SequenceGroupFailed, node: str) -> OutriderError:
    """What the client is told when a decode node gives a group up."""
    message = f"decode node {node}: {failed.message}"
    match failed.code:
        case code_pb2.INVALID_ARGUMENT:
            return InvalidRequestError(failed.message, field="prompt")
        case code_pb2.RESOURCE_EXHAUSTED:
            return CapacityError(message)
        case code_pb2.ABORTED:
            return AbortedError(message)
        case code_pb2.INTERNAL:
            return InternalError(message)
        case _:
            return PeerLostError(message, node=node)
