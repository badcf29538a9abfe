"""Keeps resumable requests in the store that routers share, and takes over those of routers that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from outrider.errors import (
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    NotFoundError,
    PeerLostError,
    StoreError,
)
from outrider.request import Request
from outrider.service.telemetry.logging import get_logger
from outrider.session import SampleTokens
from router.answer import Answer
from router.running_requests import RunningRequest
from router.store.base import AnswerStore, StoredAnswer, StoredRequest, TokenSpan

_log = get_logger("store")

Restore = Callable[[StoredAnswer], Awaitable[RunningRequest]]
"""Begins a claimed request here."""


class Keeper(Protocol):
    """What the servicer asks of durability."""

    async def keep(self, running: RunningRequest, answer: Answer, stored: StoredRequest) -> bool:
        """Stores a request, before its Started. False: it is served without the store.

        Raises: AlreadyRunningError when another router has the id; StoreError.
        """

    async def resume(self, request_id: str, *, fingerprint: str) -> RunningRequest:
        """Takes a request over. Raises: NotFoundError, MismatchError, StoreError."""

    def is_claiming(self, request_id: str) -> bool:
        """Whether `resume` of this request is under way."""

    async def abort(self, request_id: str) -> bool:
        """Asks whichever router has the request. Raises: StoreError."""

    async def stop(self) -> None: ...


class NoKeeper:
    """Without a shared store an answer lives and dies with its router."""

    async def keep(self, running: RunningRequest, answer: Answer, stored: StoredRequest) -> bool:
        return True

    async def resume(self, request_id: str, *, fingerprint: str) -> RunningRequest:
        raise NotFoundError(f"no request {request_id!r} is running or resumable here", reason="REQUEST_NOT_FOUND")

    def is_claiming(self, request_id: str) -> bool:
        return False

    async def abort(self, request_id: str) -> bool:
        return False

    async def stop(self) -> None:
        """Nothing to stop."""


@dataclass(slots=True)
class _Kept:
    """One request of ours in the store."""

    running: RunningRequest
    answer: Answer
    stored: StoredRequest
    positions: list[int] = field(default_factory=list)  # by sample: the next one to append
    has_finished: bool = False  # the store has been told

    def new_spans(self) -> Iterator[TokenSpan]:
        """What the store does not have. Tokens with logprobs are computed again instead."""
        if self.answer.request.output.logprobs is not None:
            return
        for sample, (known, position) in enumerate(zip(self.answer.samples, self.positions, strict=True)):
            if known.next_position > position:
                yield TokenSpan(self.stored.request_id, sample, position, known.token_ids_from(position))

    def take_stored(self, spans: list[TokenSpan]) -> None:
        for span in spans:
            self.positions[span.sample] = span.start_position + len(span.token_ids)


class AnswerKeeper:
    """Owned by the event loop. Writes behind the token path, for all requests together.

    While the store does not answer, running requests go on and are written when it is back.
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
        self._store = store
        self._restore = restore
        self._may_serve_without = may_serve_without
        self._append_seconds = append_seconds
        self._renew_seconds = renew_seconds
        self._kept: dict[str, _Kept] = {}
        self._claims: dict[str, asyncio.Task[RunningRequest]] = {}
        self._is_lost = False
        self._deleting = asyncio.Lock()
        self._work = asyncio.create_task(self._run(), name="store")

    async def keep(self, running: RunningRequest, answer: Answer, stored: StoredRequest) -> bool:
        kept = _Kept(running, answer, stored, [sample.start_position for sample in answer.samples])
        try:
            async with self._deleting:  # an earlier request of this name may be on its way out
                self._kept.pop(stored.request_id, None)
                await self._store.create(stored)
        except StoreError as error:
            self._note_lost(error)
            if not self._may_serve_without:
                raise
            return False
        self._kept[stored.request_id] = kept
        return True

    async def resume(self, request_id: str, *, fingerprint: str) -> RunningRequest:
        task = self._claims.get(request_id)
        if task is None:
            task = self._claims[request_id] = asyncio.create_task(self._claim(request_id, fingerprint))
            task.add_done_callback(lambda _task: self._claims.pop(request_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_begin_window)  # nobody may be left to read it
            raise

    def is_claiming(self, request_id: str) -> bool:
        return request_id in self._claims

    async def abort(self, request_id: str) -> bool:
        return await self._store.request_abort(request_id)

    async def stop(self) -> None:
        """Writes what is known, and leaves the requests to other routers."""
        self._work.cancel()
        with suppress(asyncio.CancelledError):
            await self._work
        with suppress(StoreError):
            await self._append()
        with suppress(StoreError):
            await self._store.close()

    async def _claim(self, request_id: str, fingerprint: str) -> RunningRequest:
        claimed = await self._store.claim(request_id, fingerprint=fingerprint, take_over=True)
        if not isinstance(claimed, StoredAnswer):
            raise NotFoundError(f"no router has a request {request_id!r}", reason="REQUEST_NOT_FOUND")
        running = await self._restore(claimed)
        answer = running.answer
        self._kept[request_id] = _Kept(
            running,
            answer,
            claimed.request,
            [sample.start_position + len(claimed.token_ids.get(i, ())) for i, sample in enumerate(answer.samples)],
        )
        _log.info("request taken over", request_id=request_id, num_known_tokens=answer.num_generated_tokens)
        return running

    # ------------------------------------------------------------ behind the token path

    async def _run(self) -> None:
        """Renewals first: what cannot be appended is computed again, a lease that lapses is lost."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while True:
            await asyncio.sleep(self._append_seconds)
            steps = [self._settle, self._append]
            if loop.time() >= renew_at:
                renew_at = loop.time() + self._renew_seconds
                steps.insert(0, self._renew)
            failures = [error for step in steps if (error := await self._attempt(step)) is not None]
            if failures:
                self._note_lost(failures[0])
            else:
                self._note_found()

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> StoreError | None:
        try:
            await step()
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 the others are still to be kept
            _log.exception("keeping requests failed", error=str(error))
        return None

    async def _append(self) -> None:
        by_kept = [(kept, list(kept.new_spans())) for kept in self._kept.values()]
        spans = [span for _, found in by_kept for span in found]
        if spans:
            await self._store.append(spans)
        for kept, found in by_kept:
            kept.take_stored(found)

    async def _settle(self) -> None:
        """Tells the store of requests that have ended, and forgets those that are dropped here."""
        for request_id, kept in tuple(self._kept.items()):
            failure = kept.answer.failure
            if isinstance(failure, (PeerLostError, CapacityError)):  # another router may do better
                self._kept.pop(request_id, None)
            elif kept.running.is_closed or failure is not None:
                async with self._deleting:
                    if self._kept.get(request_id) is kept:
                        await self._store.delete(request_id)
                        del self._kept[request_id]
            elif kept.running.is_idle and not kept.has_finished:
                await self._store.finish(request_id)
                kept.has_finished = True

    async def _renew(self) -> None:
        ours = [request_id for request_id, kept in self._kept.items() if not kept.running.is_idle]
        if not ours:
            return
        renewal = await self._store.renew(ours)
        for request_id in renewal.taken:
            taken = self._kept.pop(request_id, None)
            if taken is not None:
                taken.running.fail(
                    AbortedError("another router has taken the request over", reason="RESUMED_ELSEWHERE")
                )
                taken.running.close()
        for request_id in renewal.aborted:
            if request_id in self._kept:
                self._kept[request_id].running.abort()
        for request_id in renewal.missing:
            lost = self._kept.get(request_id)
            if lost is not None:
                try:
                    await self._store.create(lost.stored)
                except AlreadyRunningError:  # another router's since: the next renewal says so
                    continue
                lost.positions = [sample.start_position for sample in lost.answer.samples]

    def _note_lost(self, error: StoreError) -> None:
        if not self._is_lost:
            self._is_lost = True
            _log.warning("the store does not answer", store=self._store.name, error=error.message)

    def _note_found(self) -> None:
        if self._is_lost:
            self._is_lost = False
            _log.info("the store answers again", store=self._store.name)


def _begin_window(claim: asyncio.Task[RunningRequest]) -> None:
    if not claim.cancelled() and claim.exception() is None:
        claim.result().leave()


def take_known_tokens(answer: Answer, stored: StoredAnswer) -> None:
    """Another router's tokens, as if they had been computed here. Logprobs are not stored: then none counts."""
    if answer.request.output.logprobs is not None:
        return
    for sample, token_ids in stored.token_ids.items():
        if sample < len(answer.samples):
            start = answer.samples[sample].start_position
            answer.take(SampleTokens(sequence_group_id=b"", sample=sample, start_position=start, token_ids=token_ids))


def stored_request(
    key: str, request: Request, proto: bytes, *, fingerprint: str, window: float, numerics: str
) -> StoredRequest:
    return StoredRequest(
        request_id=key,
        fingerprint=fingerprint,
        resume_window_seconds=window,
        start_position=len(request.prompt_token_ids) + len(request.generated_token_ids),
        request=proto,
        numerics=numerics,
    )
