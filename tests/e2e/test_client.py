"""What the client promises, seen on the nodes: a cancel frees, a broken connection costs only time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading

import pytest

from outrider.client import AsyncClient, Client, RetryPolicy
from outrider.node import NodeRole

PROMPT = [(i * 7) % 250 + 20 for i in range(120)]
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "n": 2, "seed": 1}
WAIT_SECONDS = 60.0


def holds_blocks(status):
    decode = status.by_role()[NodeRole.DECODE]
    return any(node.load.num_running and node.load.kv_blocks_free < node.load.kv_blocks_total for node in decode)


class Held:
    """The decode node, which waits in its step from the moment that it is seen to work: no answer ends meanwhile."""

    def __init__(self, running):
        self._running = running
        self._steps = contextlib.ExitStack()

    def seen(self):
        self._steps.enter_context(self._running.held_steps())
        self._running.wait_for(holds_blocks, what="a running sequence")

    def go_on(self):
        self._steps.close()

    def freed(self):
        """Goes on, and waits until it is seen to hold nothing."""
        self.go_on()
        self._running.wait_until_nothing_is_held()


@pytest.fixture
def decode_node(running):
    """Holds nothing at first and at the end."""
    running.wait_until_nothing_is_held()
    held = Held(running)
    yield held
    held.freed()


async def leave_the_block(stream, decode_node):
    async with stream:
        async for _ in stream:
            await asyncio.to_thread(decode_node.seen)
            break


async def cancel_from_another_task(stream, decode_node):
    async def read():
        async for _ in stream:
            pass

    reading = asyncio.create_task(read())
    await asyncio.to_thread(decode_node.seen)
    stream.cancel()
    await asyncio.wait_for(reading, WAIT_SECONDS)


async def cancel_the_task(stream, decode_node):
    async def read():
        async for _ in stream:
            pass

    reading = asyncio.create_task(read())
    await asyncio.to_thread(decode_node.seen)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("leave", [leave_the_block, cancel_from_another_task, cancel_the_task])
async def test_an_async_stream_that_is_left_frees_its_blocks(running, decode_node, leave):
    async with AsyncClient(running.router_address) as client:
        await leave(client.generate(PROMPT, **ENDLESS), decode_node)
        await asyncio.to_thread(decode_node.freed)


async def test_a_cancelled_complete_frees_its_blocks(running, decode_node):
    async with AsyncClient(running.router_address) as client:
        waiting = asyncio.create_task(client.complete(PROMPT, **ENDLESS))
        await asyncio.to_thread(decode_node.seen)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(decode_node.freed)


def test_a_stream_is_cancelled_from_another_thread(running, decode_node):
    with Client(running.router_address) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = client.generate(PROMPT, **ENDLESS)
        has_read = threading.Event()

        def read():
            for _ in stream:
                has_read.set()

        reading = pool.submit(read)
        assert has_read.wait(WAIT_SECONDS)
        decode_node.seen()
        stream.cancel()
        reading.result(WAIT_SECONDS)
        decode_node.freed()


def test_an_exception_in_the_block_frees_as_well(running, decode_node):
    with Client(running.router_address) as client:
        with contextlib.suppress(KeyError), client.generate(PROMPT, **ENDLESS) as stream:
            for _ in stream:
                decode_node.seen()
                raise KeyError
        decode_node.freed()


def test_closing_the_client_ends_what_runs(running, decode_node):
    client = Client(running.router_address)
    deltas = iter(client.generate(PROMPT, **ENDLESS))
    next(deltas)
    decode_node.seen()
    client.close()


def test_a_stream_can_be_aborted_by_its_name_before_it_says_anything(running, decode_node):
    with Client(running.router_address) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = client.generate(PROMPT, **ENDLESS)
        reading = pool.submit(list, stream)
        decode_node.seen()
        assert client.abort(stream.request_id)
        reading.result(WAIT_SECONDS)
    assert stream.summary.request_id == stream.request_id


class CuttingProxy:
    """Forwards one connection after the other to the router; of the first it keeps all answers, until it is cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._router = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                router = socket.create_connection(self._router, timeout=WAIT_SECONDS)
                router.settimeout(None)
                self.num_connections += 1
                self._sockets += [client, router]
                # The settings that open HTTP/2 are few bytes; what is kept is what comes behind them.
                limit = 120 if self.num_connections == 1 else None
                for source, sink, most in ((client, router, None), (router, client, limit)):
                    threading.Thread(target=self._forward, args=(source, sink, most), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        num_sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept = data if limit is None else data[: max(limit - num_sent, 0)]
                sink.sendall(kept)
                num_sent += len(kept)

    def cut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_connection_that_breaks_before_the_first_token_costs_only_time(running, decode_node):
    expected = running.client.complete(PROMPT, seed=5, max_tokens=400, ignore_eos=True).completions[0].token_ids
    with contextlib.closing(CuttingProxy(running.router_address)) as proxy:
        client = Client(proxy.address, retry=RetryPolicy(max_attempts=8))
        with client, concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = client.generate(PROMPT, seed=5, max_tokens=400, ignore_eos=True, timeout_seconds=WAIT_SECONDS)
            reading = pool.submit(list, stream)
            decode_node.seen()
            proxy.cut()
            decode_node.go_on()
            reading.result(WAIT_SECONDS)
        assert stream.token_ids() == expected
        assert proxy.num_connections == 2
