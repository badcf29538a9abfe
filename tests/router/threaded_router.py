"""A router on an event loop of its own, so that what a client costs it can be told from what the client does."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import grpc

from tests.router.conftest import Cluster

SERVICE = "/outrider.v1.RouterService/"
CALL_SECONDS = 60.0


class ThreadedRouter:
    """A router before fake nodes on an event loop in a thread, and the longest stall of that loop."""

    def __init__(self, *, decode_max_running=64):
        gc.collect()
        gc.freeze()  # what earlier tests have left is not searched for garbage in the router's turns
        self.longest_stall_seconds = 0.0  # of processor time: see `_watch`
        self.cluster = Cluster()
        self.cluster.decode.max_running = decode_max_running
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.run(self.cluster.serve())
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        self.channel = grpc.insecure_channel(self.cluster.address)

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def stop(self):
        self.channel.close()
        self._watching.cancel()
        self.run(self.cluster.stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()
        gc.unfreeze()

    def call(self, method, data):
        """(status, messages) of a call with these bytes."""
        answers = self.channel.unary_stream(SERVICE + method)(data, timeout=CALL_SECONDS)
        try:
            return grpc.StatusCode.OK, list(answers)
        except grpc.RpcError as error:
            return error.code(), []

    async def _watch(self):
        """The loop's thread's own time between two turns of a task: another client would have waited for it."""
        while True:
            asked_at = time.thread_time()
            await asyncio.sleep(0.005)
            self.longest_stall_seconds = max(self.longest_stall_seconds, time.thread_time() - asked_at)
