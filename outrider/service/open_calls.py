"""Tracks calls until their status has been sent, so that a process does not exit earlier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.service.rpc_errors import Context


class OpenCalls:
    """The calls whose status has not been sent yet. Owned by the event loop.

    When a handler returns or aborts, its call is still open, because gRPC sends the status later.
    """

    def __init__(self, on_refused: Callable[[OutriderError], None] = lambda _error: None) -> None:
        """`on_refused` is called for each client call that is rejected before it reaches its servicer."""
        self.on_refused = on_refused
        self._open: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, context: Context) -> None:
        """Counts the call as open until gRPC has ended it."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(ended)

        def leave(_context: object) -> None:
            self._open.discard(ended)
            if not ended.done():
                ended.set_result(None)

        context.add_done_callback(leave)  # type: ignore[arg-type] # it takes any callable, unlike its stub

    async def wait_for_open(self, timeout_seconds: float) -> int:
        """Waits until the calls that are open now have ended. Returns how many of them the timeout leaves open."""
        if not self._open:
            return 0
        _, unended = await asyncio.wait(set(self._open), timeout=timeout_seconds)
        return len(unended)
