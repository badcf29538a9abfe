"""An event loop in a thread of its own, so that its processor time can be told from that of its peers."""

from __future__ import annotations

import asyncio
import threading
import time

CALL_SECONDS = 60.0


class LoopThread:
    """Runs an event loop and coroutines that other threads pass to it."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_SECONDS)

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_SECONDS)
        self.loop.close()


class Stalls:
    """Measures the processor time of the loop's thread between two turns of a task. All other tasks wait that long."""

    longest_stall_seconds = 0.0  # processor time, which does not grow on a busy machine

    async def watch(self):
        while True:
            asked_at = time.thread_time()
            await asyncio.sleep(0.005)
            self.longest_stall_seconds = max(self.longest_stall_seconds, time.thread_time() - asked_at)


class WatchedLoop(Stalls, LoopThread):
    """Measures the longest stall of its loop."""

    def __init__(self):
        super().__init__()
        self.run(self._begin())

    def stop(self):
        self.run(self._end())
        super().stop()

    async def _begin(self):
        self._watching = asyncio.ensure_future(self.watch())

    async def _end(self):
        self._watching.cancel()
        await asyncio.wait((self._watching,))
