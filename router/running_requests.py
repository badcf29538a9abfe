"""Requests by their client's name for them, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from outrider.errors import AlreadyRunningError, OutriderError


class Stoppable(Protocol):
    """What runs under a name (`router.request_flow.RequestFlow`)."""

    def abort(self) -> bool: ...

    def fail(self, error: OutriderError) -> None: ...


class RunningRequest:
    """One name in use. Stopping works from the first moment, before there is a flow to stop."""

    def __init__(self) -> None:
        self._flow: Stoppable | None = None
        self._is_aborted = False
        self._error: OutriderError | None = None

    def attach(self, flow: Stoppable) -> None:
        """`flow` is stopped at once if that was asked for already."""
        self._flow = flow
        if self._is_aborted:
            flow.abort()
        elif self._error is not None:
            flow.fail(self._error)

    def abort(self) -> bool:
        """Whether there was something to stop."""
        if self._flow is not None:
            return self._flow.abort()
        was_aborted, self._is_aborted = self._is_aborted, True
        return not was_aborted

    def fail(self, error: OutriderError) -> None:
        """The request ends with this error, unless it has ended."""
        self._error = error
        if self._flow is not None:
            self._flow.fail(error)


class RunningRequests:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningRequest] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def enter(self, request_id: str) -> Iterator[RunningRequest]:
        """Takes the name until the block is left. Raises: AlreadyRunningError."""
        if request_id in self._by_id:
            raise AlreadyRunningError(f"request {request_id!r} is running", reason="DUPLICATE_REQUEST_ID")
        running = self._by_id[request_id] = RunningRequest()
        self._is_empty.clear()
        try:
            yield running
        finally:
            del self._by_id[request_id]
            if not self._by_id:
                self._is_empty.set()

    def abort(self, request_id: str) -> bool:
        """False: unknown, or it has ended already."""
        running = self._by_id.get(request_id)
        return running is not None and running.abort()

    def fail_all(self, error: OutriderError) -> None:
        """Every request that runs ends with this error."""
        for running in self._by_id.values():
            running.fail(error)

    async def wait_until_none(self) -> None:
        await self._is_empty.wait()
