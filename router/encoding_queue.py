"""Texts that wait for one of the tokenizer's threads: bounded, and fair between clients."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.errors import CapacityError
from router.fair_order import FairOrder

T = TypeVar("T")

MAX_WAITING_BYTES = 32 << 20
"""Some ten seconds of two threads."""
MAX_CLIENT_BYTES = 8 << 20
"""Of those, of one client: four of the largest requests."""
NEWCOMERS = 4
"""A client with nothing in the queue is let in until this many times as much waits: names can be made up."""
RETRY_SECONDS = 1.0


class EncodingQueue:
    """Owned by the event loop. Work is given to the threads only when one of them is free."""

    def __init__(
        self,
        num_threads: int,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_client_bytes: int = MAX_CLIENT_BYTES,
    ) -> None:
        self._num_threads = num_threads
        self._max_waiting_bytes = max_waiting_bytes
        self._max_client_bytes = max_client_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._num_running = 0
        self._order = FairOrder()
        self._arrivals = itertools.count()
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []  # (stamp, arrival, turn)
        self._waiting_bytes: Counter[str] = Counter()  # by client

    async def run(self, work: Callable[[], T], *, client: str, num_bytes: int) -> T:
        """What `work` returns or raises, from a thread, in the client's turn. Cancelling leaves the queue.

        Raises: CapacityError at once when too much waits already.
        """
        if self._num_running < self._num_threads:
            self._num_running += 1
        else:
            await self._wait(client, max(num_bytes, 1))
        loop = asyncio.get_running_loop()

        def end(_work: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._give_turn)

        running = self._threads.submit(work)
        running.add_done_callback(end)  # when the thread is free, whoever still waits for the result
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, client: str, num_bytes: int) -> None:
        """Until one of the threads is this one's. Raises: CapacityError."""
        waiting, total = self._waiting_bytes[client], self._waiting_bytes.total()
        most, most_of_all = self._max_client_bytes, self._max_waiting_bytes
        if not waiting:
            most, most_of_all = max(most, num_bytes), max(NEWCOMERS * most_of_all, num_bytes)
        if waiting + num_bytes > most or total + num_bytes > most_of_all:
            raise CapacityError(
                f"{waiting} bytes of this client's texts wait to be encoded, {total} of all clients",
                retry_after_seconds=RETRY_SECONDS,
                reason="TOKENIZER_BUSY",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (self._order.stamp(client, num_bytes), next(self._arrivals), turn))
        self._waiting_bytes[client] += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._order.refund(client, num_bytes)
            else:  # given at the moment it was no longer wanted
                self._give_turn()
            raise
        finally:
            self._waiting_bytes[client] -= num_bytes
            if not self._waiting_bytes[client]:
                del self._waiting_bytes[client]

    def _give_turn(self) -> None:
        """A thread is free: the next one's, if there is one."""
        while self._heap:
            stamp, _, turn = heapq.heappop(self._heap)
            if not turn.done():
                self._order.serve(stamp)
                turn.set_result(None)
                return
        self._num_running -= 1
