"""Requests by their client's name for them, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.errors import AlreadyRunningError


class RunningRequest:
    """One name in use. Aborting works from the first moment, before there is a flow to abort."""

    def __init__(self) -> None:
        self._abort: Callable[[], bool] | None = None
        self._is_aborted = False

    def attach(self, abort: Callable[[], bool]) -> None:
        """`abort` stops the request; it is called at once if that was asked for already."""
        self._abort = abort
        if self._is_aborted:
            abort()

    def abort(self) -> bool:
        """Whether there was something to stop."""
        if self._abort is not None:
            return self._abort()
        was_aborted, self._is_aborted = self._is_aborted, True
        return not was_aborted


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

    async def wait_until_none(self) -> None:
        await self._is_empty.wait()
