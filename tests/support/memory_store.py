"""An answer store without a server: routers of one process share its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.errors import StoreError
from router.durability.store.base import (
    Renewal,
    StoredAnswer,
    StoredRequest,
    TokenLog,
    TokenSpan,
    already_running,
    model_mismatch,
)


@dataclass(slots=True)
class _Record:
    stored: StoredRequest
    owner: bytes
    expires_at: float
    tokens: TokenLog
    is_finished: bool = False
    is_aborted: bool = False


class MemoryRecords:
    """The records that a server would hold, by request id. Times are monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._by_id: dict[str, _Record] = {}

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._by_id)

    def get(self, request_id: str) -> _Record | None:
        record = self._by_id.get(request_id)
        if record is not None and record.expires_at <= self.clock():
            del self._by_id[request_id]
            return None
        return record

    def put(self, record: _Record) -> None:
        self._drop_expired()
        self._by_id[record.stored.request_id] = record

    def remove(self, request_id: str) -> None:
        del self._by_id[request_id]

    def _drop_expired(self) -> None:
        now = self.clock()
        for request_id in [key for key, record in self._by_id.items() if record.expires_at <= now]:
            del self._by_id[request_id]


class MemoryAnswerStore:
    """An `AnswerStore` in this process; it never raises StoreError."""

    name = "memory"

    def __init__(self, *, owner: bytes, lease_seconds: float, records: MemoryRecords | None = None) -> None:
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._records = MemoryRecords() if records is None else records

    async def create(self, stored: StoredRequest) -> None:
        record = self._records.get(stored.request_id)
        if record is not None and record.owner != self._owner:
            raise already_running(stored.request_id)
        record = _Record(stored, self._owner, 0.0, TokenLog(stored.start_position))
        self._hold(record)
        self._records.put(record)

    async def append(self, spans: Iterable[TokenSpan]) -> None:
        for span in spans:
            record = self._ours(span.request_id)
            if record is not None:
                record.tokens.add(span.sample, span.start_position, span.token_ids)

    async def renew(self, request_ids: Iterable[str]) -> Renewal:
        taken, missing, aborted = set(), set(), set()
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is None:
                missing.add(request_id)
            elif record.owner != self._owner:
                taken.add(request_id)
            else:
                self._hold(record)
                if record.is_aborted:
                    aborted.add(request_id)
        return Renewal(taken=frozenset(taken), missing=frozenset(missing), aborted=frozenset(aborted))

    async def finish(self, request_ids: Iterable[str]) -> None:
        for record in map(self._ours, request_ids):
            if record is not None:
                record.is_finished = True
                record.expires_at = self._records.clock() + record.stored.resume_window_seconds

    async def delete(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._ours(request_id) is not None:
                self._records.remove(request_id)

    async def read(self, request_id: str) -> StoredAnswer | None:
        record = self._records.get(request_id)
        if record is None:
            return None
        return StoredAnswer(
            request=record.stored,
            token_ids=record.tokens.token_ids(),
            is_ours=record.owner == self._owner,
            is_aborted=record.is_aborted,
        )

    async def claim(self, request_id: str, *, fingerprint: str) -> StoredAnswer | None:
        record = self._records.get(request_id)
        if record is None:
            return None
        if record.stored.fingerprint != fingerprint:
            raise model_mismatch(request_id, stored=record.stored.fingerprint, served=fingerprint)
        record.owner, record.is_finished = self._owner, False
        self._hold(record)
        return await self.read(request_id)

    async def request_abort(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        if record is None or record.is_finished or record.is_aborted:
            return False
        record.is_aborted = True
        return True

    async def close(self) -> None:
        """Does nothing."""

    def _ours(self, request_id: str) -> _Record | None:
        record = self._records.get(request_id)
        return record if record is not None and record.owner == self._owner else None

    def _hold(self, record: _Record) -> None:
        """Keeps the record for the lease and the resume window after its owner's last renewal."""
        record.expires_at = self._records.clock() + self._lease_seconds + record.stored.resume_window_seconds


def _unless_lost(name):
    async def call(store, *arguments, **named):
        if store.is_lost:
            raise StoreError("the scripted store is lost")
        return await getattr(MemoryAnswerStore, name)(store, *arguments, **named)

    return call


class FlakyStore(MemoryAnswerStore):
    """A store that raises StoreError while `is_lost`."""

    is_lost = False
    create, append, renew, claim = map(_unless_lost, ("create", "append", "renew", "claim"))
