"""Texts that wait for one of the tokenizer's threads: bounded, and fair between clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from outrider.errors import CapacityError

T = TypeVar("T")

MAX_WAITING_BYTES = 32 << 20
"""Some ten seconds of two threads."""
MAX_CLIENT_BYTES = 8 << 20
"""Of those, of one client: four of the largest requests."""
NEW_CLIENT_FACTOR = 4
"""Clients without texts here may exceed the limit for all by so much, no further: client names are unverified."""
RETRY_SECONDS = 1.0


class EncodingQueue:
    """Owned by the event loop. Clients take turns: none has more texts at the threads than there are threads."""

    def __init__(
        self,
        num_threads: int,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_client_bytes: int = MAX_CLIENT_BYTES,
        busy_reason: str = "TOKENIZER_BUSY",
    ) -> None:
        """`busy_reason`: of the CapacityError where too much waits."""
        self._num_threads = num_threads
        self._max_waiting_bytes = max_waiting_bytes
        self._max_client_bytes = max_client_bytes
        self._busy_reason = busy_reason
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client
        self._num_bytes: Counter[str] = Counter()  # by client, of texts that wait or are encoded

    async def run(self, work: Callable[[], T], *, client: str, num_bytes: int) -> T:
        """What `work` returns or raises, from a thread, in the client's turn. Cancelling leaves the queue.

        Raises: CapacityError at once when too much waits already.
        """
        self._check(client, num_bytes)
        turn = self._turns.setdefault(client, asyncio.Semaphore(self._num_threads))
        self._num_bytes[client] += num_bytes
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_bytes[client] -= num_bytes
            if not self._num_bytes[client]:
                del self._num_bytes[client]

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, client: str, num_bytes: int) -> None:
        """A text alone always fits. Raises: CapacityError."""
        of_client, total = self._num_bytes[client], self._num_bytes.total()
        limit = self._max_waiting_bytes * (1 if of_client else NEW_CLIENT_FACTOR)
        is_over = (of_client and of_client + num_bytes > self._max_client_bytes) or total + num_bytes > limit
        if is_over and total:
            raise CapacityError(
                f"too much waits: {of_client} bytes of this client, {total} of all clients",
                retry_after_seconds=RETRY_SECONDS,
                reason=self._busy_reason,
            )
