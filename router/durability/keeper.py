"""Replicates resumable requests to the store that routers share, and takes over requests of other routers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from outrider.errors import (
    POISON_REQUEST,
    RESUMED_ELSEWHERE,
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    NotFoundError,
    PeerLostError,
    StoreError,
)
from outrider.service.telemetry.logging import get_logger
from outrider.session import SampleTokens
from router.durability.store.base import AnswerStore, SpansRefusedError, StoredAnswer, StoredRequest, TokenSpan
from router.requests.answer import Answer
from router.requests.live import LiveRequest

MAX_SPAN_TOKENS = 4096
"""Maximum tokens of one sample in one append."""
MAX_APPEND_TOKENS = 65_536
"""Number of tokens after which an append includes no further request, so that the store answers within milliseconds."""
MAX_LOST_APPENDS = 5
"""Maximum number of lost attempts to append the last tokens of a request that failed here. After that, the tokens have
to be recomputed.
"""
CREATES_AT_ONCE = 16
"""Number of concurrent creates after the store has lost its contents. The renewal waits for them."""
MAX_TO_DELETE = 4096
"""Maximum number of ids that are remembered for deletion while the store does not answer."""

_log = get_logger("store")

Restore = Callable[[StoredAnswer], Awaitable[LiveRequest]]
"""The function that starts a claimed request on this router."""


@dataclass(slots=True)
class _Kept:
    """A request of this router that is in the store."""

    running: LiveRequest
    stored: StoredRequest
    positions: dict[int, int] = field(default_factory=dict)  # by sample: next position to append; if absent, its start
    was_claimed: bool = False  # whether the request was claimed from another router
    has_finished: bool = False  # whether `finish` has been sent to the store
    is_refused: bool = False  # whether the store has refused tokens; after a gap it takes no more
    num_lost_appends: int = 0

    def new_spans(self) -> Iterator[TokenSpan]:
        """Yields the tokens that the store does not have, a bounded number per sample.

        Yields nothing if the answer has logprobs or the store has refused tokens. The tokens are recomputed then.
        """
        answer = self.running.answer
        if answer.request.options.logprobs is not None or self.is_refused:
            return
        for sample, known in enumerate(answer.samples):
            position = self.positions.get(sample, known.start_position)
            if known.next_position > position:
                token_ids = known.token_ids_from(position)[:MAX_SPAN_TOKENS]
                yield TokenSpan(self.stored.request_id, sample, position, token_ids)

    @property
    def may_continue_elsewhere(self) -> bool:
        """Whether the request failed here for lack of nodes or room, so that the store keeps it for other routers."""
        answer = self.running.answer
        was_begun = self.was_claimed or answer.started is not None
        is_curable = (
            isinstance(answer.failure, (PeerLostError, CapacityError)) and answer.failure.reason != POISON_REQUEST
        )
        return was_begun and is_curable


class AnswerReplicator:
    """Replicates resumable requests to a store. Owned by the event loop.

    It writes for all requests together, off the token path. While the store does not answer, running requests
    continue, and are written once the store is back.
    """

    def __init__(
        self,
        store: AnswerStore,
        *,
        restore: Restore,
        may_serve_without: bool,
        append_seconds: float,
        renew_seconds: float,
    ) -> None:
        self.store = store
        self._restore = restore
        self._may_serve_without = may_serve_without
        self._append_seconds = append_seconds
        self._renew_seconds = renew_seconds
        self._kept: dict[str, _Kept] = {}  # by request id
        self._resting: dict[str, _Kept] = {}  # ended requests by id, not polled until `wake`
        self._claims: dict[str, asyncio.Task[LiveRequest]] = {}
        self._is_lost = False
        self._to_delete: dict[str, None] = {}  # ids, in the order in which the requests ended
        self._deleting = asyncio.Lock()
        self._work = asyncio.create_task(self._run(), name="store")

    async def keep(self, running: LiveRequest, stored: StoredRequest) -> bool:
        """Stores a request, before its Started message. Returns False if the request is served without the store.

        Raises: AlreadyRunningError if another router has the id; StoreError.
        """
        request_id = stored.request_id
        await self._take_name(request_id)
        try:
            await self.store.create(stored)
        except AlreadyRunningError:
            raise
        except BaseException as error:
            self._delete_later(request_id)  # the request may have been stored, and would block the id
            if not isinstance(error, StoreError):  # the client has left
                raise
            self._log_availability(error)
            if not self._may_serve_without:
                raise
            return False
        self._kept[request_id] = _Kept(running, stored)
        if running.answer.failure is not None:  # the id must be free before the client gets the error
            self._settle()
            await self._attempt(self._delete)
        return True

    async def resume(self, request_id: str, *, fingerprint: str) -> LiveRequest:
        """Takes over a request from another router. Raises: NotFoundError, MismatchError, StoreError."""
        task = self._claims.get(request_id)
        if task is None:
            task = self._claims[request_id] = asyncio.create_task(self._claim(request_id, fingerprint))
            task.add_done_callback(lambda _task: self._claims.pop(request_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_begin_window)  # the request may have no reader left
            raise

    def wake(self, request_id: str) -> None:
        """Resumes polling of a request that has a reader again or is closed."""
        if (kept := self._resting.pop(request_id, None)) is not None:
            self._kept[request_id] = kept

    def is_claiming(self, request_id: str) -> bool:
        """Whether `resume` of this request is in progress."""
        return request_id in self._claims

    async def stop(self) -> None:
        """Writes the remaining tokens and leaves the requests to other routers."""
        self._work.cancel()
        with suppress(asyncio.CancelledError):
            await self._work
        with suppress(StoreError):
            while await self._append():
                pass
            self._settle()
            await self._delete()
        with suppress(StoreError):
            await self.store.close()

    async def _take_name(self, request_id: str) -> None:
        """Frees the id for a new request. An earlier request with this id is deleted now or not at all."""
        if request_id in self._to_delete:
            async with self._deleting:
                self._to_delete.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._resting.pop(request_id, None)

    async def _claim(self, request_id: str, fingerprint: str) -> LiveRequest:
        await self._take_name(request_id)
        claimed = await self.store.claim(request_id, fingerprint=fingerprint)
        if claimed is None:
            raise NotFoundError(f"no router has a request {request_id!r}", reason="REQUEST_NOT_FOUND")
        running = await self._restore(claimed)
        start = claimed.request.start_position
        positions = {sample: start + len(token_ids) for sample, token_ids in claimed.token_ids.items()}
        self._kept[request_id] = _Kept(running, claimed.request, positions, was_claimed=True)
        _log.info("request taken over", request_id=request_id, num_known_tokens=running.answer.num_generated_tokens)
        return running

    # ------------------------------------------------------------ off the token path

    async def _run(self) -> None:
        """Replicates periodically. Renewals come first, as lost tokens can be recomputed, but lost leases cannot."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while True:
            await asyncio.sleep(self._append_seconds)
            steps: list[Callable[[], Awaitable[object]]] = [self._append, self._finish, self._delete]
            if loop.time() >= renew_at:
                renew_at = loop.time() + self._renew_seconds
                steps.insert(0, self._renew)
            self._settle()
            failures = [error for step in steps if (error := await self._attempt(step)) is not None]
            self._log_availability(failures[0] if failures else None)

    async def _attempt(self, step: Callable[[], Awaitable[object]]) -> StoreError | None:
        try:
            await step()
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 the other requests still have to be replicated
            _log.exception("replicating requests failed", error=str(error))
        return None

    async def _append(self) -> bool:
        """Appends new tokens. Returns whether there were any."""
        found: list[tuple[_Kept, list[TokenSpan]]] = []
        num_tokens = 0
        for kept in self._kept.values():
            spans = list(kept.new_spans())
            num_tokens += sum(len(span.token_ids) for span in spans)
            if spans:
                found.append((kept, spans))
            if num_tokens >= MAX_APPEND_TOKENS:
                break
        if not found:
            return False
        refused: frozenset[str] = frozenset()
        try:
            await self.store.append([span for _, spans in found for span in spans])
        except SpansRefusedError as error:
            refused = error.request_ids
            _log.warning("the store refused tokens; a router that takes over will recompute them", error=error.message)
        except StoreError:
            for kept, _ in found:
                kept.num_lost_appends += kept.may_continue_elsewhere
            raise
        for kept, spans in found:
            kept.is_refused |= kept.stored.request_id in refused
            for span in spans:
                kept.positions[span.sample] = span.end_position
        return True

    def _settle(self) -> None:
        """Forgets stored requests that other routers may continue, and deletes others that failed or were closed.

        Complete answers that are stored are not polled until a reader attaches or their windows end.
        """
        for request_id, kept in tuple(self._kept.items()):
            if kept.may_continue_elsewhere:
                if kept.num_lost_appends >= MAX_LOST_APPENDS or not any(kept.new_spans()):
                    del self._kept[request_id]
            elif kept.running.is_closed or kept.running.answer.failure is not None:
                del self._kept[request_id]
                self._delete_later(request_id)
            elif kept.has_finished and kept.running.is_idle and not any(kept.new_spans()):
                self._resting[request_id] = self._kept.pop(request_id)

    def _delete_later(self, request_id: str) -> None:
        self._to_delete[request_id] = None
        # This happens only after a long absence of the store. Requests whose ids are dropped expire by themselves.
        while len(self._to_delete) > MAX_TO_DELETE:
            del self._to_delete[next(iter(self._to_delete))]

    async def _delete(self) -> None:
        """Deletes ended requests in one call, after any other such call that is in progress."""
        async with self._deleting:
            if request_ids := tuple(self._to_delete):
                await self.store.delete(request_ids)
                for request_id in request_ids:
                    self._to_delete.pop(request_id, None)

    async def _finish(self) -> None:
        ended = [kept for kept in self._kept.values() if kept.running.is_idle and not kept.has_finished]
        if ended:
            await self.store.finish([kept.stored.request_id for kept in ended])
        for kept in ended:
            kept.has_finished = True

    async def _renew(self) -> None:
        ours = [request_id for request_id, kept in self._kept.items() if not kept.running.is_idle]
        if not ours:
            return
        renewal = await self.store.renew(ours)
        for request_id in renewal.taken:
            taken = self._kept.pop(request_id, None)
            if taken is not None:
                taken.running.close(AbortedError("another router has taken over the request", reason=RESUMED_ELSEWHERE))
        for request_id in renewal.aborted:
            if request_id in self._kept:
                self._kept[request_id].running.abort()
        missing = [self._kept[request_id] for request_id in renewal.missing if request_id in self._kept]
        renew_at = asyncio.get_running_loop().time() + self._renew_seconds
        while missing and asyncio.get_running_loop().time() < renew_at:  # the next renewal reports the rest again
            batch, missing = missing[:CREATES_AT_ONCE], missing[CREATES_AT_ONCE:]
            await asyncio.gather(*map(self._create_again, batch))

    async def _create_again(self, kept: _Kept) -> None:
        """Stores again a request that the store has lost. Raises: StoreError."""
        with suppress(AlreadyRunningError):  # another router has created it meanwhile; the next renewal reports this
            await self.store.create(kept.stored)
            kept.positions, kept.is_refused = {}, False

    def _log_availability(self, error: StoreError | None) -> None:
        """Logs when the store is lost and when it is back."""
        if error is not None and not self._is_lost:
            _log.warning("the store does not answer", store=self.store.name, error=error.message)
        elif error is None and self._is_lost:
            _log.info("the store answers again", store=self.store.name)
        self._is_lost = error is not None


def _begin_window(claim: asyncio.Task[LiveRequest]) -> None:
    if not claim.cancelled() and claim.exception() is None:
        claim.result().leave()


def add_stored_tokens(answer: Answer, stored: StoredAnswer) -> None:
    """Adds to the answer the tokens that another router has stored. Logprobs are not stored, so an answer that needs
    them gets no tokens.
    """
    if answer.request.options.logprobs is not None:
        return
    for sample, token_ids in stored.token_ids.items():
        if sample < len(answer.samples):
            start = answer.samples[sample].start_position
            answer.take(SampleTokens(sequence_group_id=b"", sample=sample, start_position=start, token_ids=token_ids))
