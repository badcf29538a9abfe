"""The store of a router without a shared one. Several in one process may share their records, as tests do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.store.base import (
    Owned,
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
    lease_until: float
    expires_at: float
    tokens: TokenLog
    is_finished: bool = False
    is_aborted: bool = False


class MemoryRecords:
    """What a server would hold, by request id. Times are monotonic seconds."""

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
        record = _Record(stored, self._owner, 0.0, 0.0, TokenLog(stored.start_position))
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

    async def finish(self, request_id: str) -> None:
        record = self._ours(request_id)
        if record is not None:
            record.is_finished = True
            record.lease_until = self._records.clock()
            record.expires_at = record.lease_until + record.stored.resume_window_seconds

    async def delete(self, request_id: str) -> None:
        if self._ours(request_id) is not None:
            self._records.remove(request_id)

    async def claim(self, request_id: str, *, fingerprint: str, take_over: bool = False) -> StoredAnswer | Owned | None:
        record = self._records.get(request_id)
        if record is None:
            return None
        if record.stored.fingerprint != fingerprint:
            raise model_mismatch(request_id, stored=record.stored.fingerprint, served=fingerprint)
        seconds_left = record.lease_until - self._records.clock()
        if record.owner != self._owner and seconds_left > 0 and not take_over:
            return Owned(record.owner, seconds_left)
        record.owner = self._owner
        self._hold(record)
        return StoredAnswer(
            request=record.stored,
            token_ids=record.tokens.token_ids(),
            is_finished=record.is_finished,
            is_aborted=record.is_aborted,
        )

    async def request_abort(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        if record is None or record.is_finished or record.is_aborted:
            return False
        record.is_aborted = True
        return True

    async def close(self) -> None:
        """Nothing to disconnect."""

    def _ours(self, request_id: str) -> _Record | None:
        record = self._records.get(request_id)
        return record if record is not None and record.owner == self._owner else None

    def _hold(self, record: _Record) -> None:
        """Takes or renews the lease; the record outlives it by the resume window."""
        record.lease_until = self._records.clock() + self._lease_seconds
        record.expires_at = record.lease_until + record.stored.resume_window_seconds
