"""One client that floods, lies and never reads, beside eight honest streams: these do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import pytest

from outrider.v1 import router_pb2
from tests.router.threaded_router import SERVICE, ThreadedRouter

R = router_pb2
NUM_STREAMS = 8
NUM_TOKENS = 60
MAX_STALL_SECONDS = 1.0
"""Of the loop that the router shares with its fake nodes, on a machine that is busy with other tests. What is looked
for took two seconds and more."""


def wire_chat(num_messages):
    chat = R.Chat()
    message = R.ChatMessage(role="u")
    chat.messages.extend([message] * num_messages)
    return R.TokenizeRequest(chat=chat).SerializeToString()


CALLS = {
    "tiny parts": ("Tokenize", lambda: wire_chat(300_000)),
    "too many parts": ("Tokenize", lambda: wire_chat(1_000_000)),
    "many ids": ("Detokenize", lambda: R.DetokenizeRequest(token_ids=[1] * 1_900_000).SerializeToString()),
    "long texts": ("Tokenize", lambda: R.TokenizeRequest(text="word " * 300_000).SerializeToString()),
    "deep schemas": (
        "Generate",
        lambda: R.GenerateRequest(text="x", sampling=R.SamplingParams(json_schema="[" * 60_000)).SerializeToString(),
    ),
    "watches": ("WatchCluster", lambda: b""),
    "streams that are not read": (
        "Generate",
        lambda: R.GenerateRequest(
            text="x" * 100, sampling=R.SamplingParams(seed=1, max_tokens=400)
        ).SerializeToString(),
    ),
    "garbage": ("Complete", lambda: b"\xff" * 100_000),
}
"""(method, request) by what is hostile in it."""


class HostileClient:
    """Calls again and again, in threads, until it is stopped."""

    def __init__(self, address, method, data, *, num_threads=3, num_unread=12):
        self.num_calls = 0
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call = self._channel.unary_stream(SERVICE + method)
        self._data = data
        self._is_unread = method in ("WatchCluster", "Generate")
        self._num_unread = num_unread
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._flood) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _flood(self):
        unread = []
        while not self._stopping.is_set():
            call = self._call(self._data, timeout=20)
            self.num_calls += 1
            if self._is_unread:
                unread.append(call)
                if len(unread) >= self._num_unread:
                    unread.pop(0).cancel()
                self._stopping.wait(0.005)
            else:
                with contextlib.suppress(grpc.RpcError):
                    list(call)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
        self._channel.close()


@pytest.fixture(scope="module")
def router():
    router = ThreadedRouter(decode_max_running=4 * NUM_STREAMS)
    router.cluster.decode.step_seconds = 0.002
    yield router
    router.stop()


async def honest_streams(cluster):
    """Token ids of each, and whether no node was ever taken for lost."""
    sampling = [cluster.sampling(seed=seed, max_tokens=NUM_TOKENS) for seed in range(NUM_STREAMS)]
    answers = await asyncio.gather(*(cluster.generate(cluster.request(sampling=one)) for one in sampling))
    return [answer.token_ids() for answer in answers], {answer.summary.metrics.attempts for answer in answers}


@pytest.mark.parametrize("kind", CALLS)
def test_honest_streams_do_not_notice(router, kind):
    undisturbed, _ = router.run(honest_streams(router.cluster))
    method, make = CALLS[kind]
    router.longest_stall_seconds = 0.0
    hostile = HostileClient(router.cluster.address, method, make())
    try:
        disturbed, attempts = router.run(honest_streams(router.cluster))
    finally:
        hostile.stop()
    assert disturbed == undisturbed
    assert attempts == {1}
    assert hostile.num_calls > 0
    assert router.longest_stall_seconds < MAX_STALL_SECONDS
    router.run(router.cluster.is_empty(seconds=10.0))
