"""Calls from their beginning until their status has been sent, for a process that is about to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.service.rpc_errors import Context


class OpenCalls:
    """Owned by the event loop. A handler that has returned or aborted has not yet sent anything: gRPC does it later."""

    def __init__(self, on_refused: Callable[[OutriderError], None] = lambda _error: None) -> None:
        """`on_refused` is called for each call of a client that is refused before its servicer hears of it."""
        self.on_refused = on_refused
        self._open: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, context: Context) -> None:
        """From now on until gRPC has ended the call."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(ended)

        def leave(_context: object) -> None:
            self._open.discard(ended)
            if not ended.done():
                ended.set_result(None)

        context.add_done_callback(leave)  # type: ignore[arg-type] # any callable, whatever its stub says

    async def wait_for_present(self, timeout_seconds: float) -> int:
        """Until those that are open now have ended, whatever comes meanwhile; how many have not after that time."""
        if not self._open:
            return 0
        _, unended = await asyncio.wait(set(self._open), timeout=timeout_seconds)
        return len(unended)
