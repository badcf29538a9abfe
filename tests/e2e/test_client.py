"""However a client leaves its request, the decode node frees the blocks; tests/client has the rest of its promises."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib

import pytest

from outrider.client import AsyncClient, Client
from outrider.node import NodeRole

PROMPT = [(i * 7) % 250 + 20 for i in range(120)]
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "n": 2, "seed": 1}
WAIT_SECONDS = 60.0


def holds_blocks(status):
    decode = status.by_role()[NodeRole.DECODE]
    return any(node.load.num_running and node.load.kv_blocks_free < node.load.kv_blocks_total for node in decode)


@pytest.fixture
def seen(running):
    """seen() waits until the decode node works, and holds it in its step: no answer ends before the test does.

    It holds nothing at first and at the end.
    """
    running.wait_until_nothing_is_held()
    with contextlib.ExitStack() as steps:

        def seen():
            steps.enter_context(running.held_steps())
            running.wait_for(holds_blocks, what="a running sequence")

        yield seen
    running.wait_until_nothing_is_held()


async def leave_the_block(client, seen):
    async with client.generate(PROMPT, **ENDLESS) as stream:
        async for _ in stream:
            await asyncio.to_thread(seen)
            break


async def cancel_the_task_that_reads(client, seen):
    async def read():
        async for _ in client.generate(PROMPT, **ENDLESS):
            pass

    await cancel_the_task(read(), seen)


async def cancel_a_complete(client, seen):
    await cancel_the_task(client.complete(PROMPT, **ENDLESS), seen)


async def cancel_the_task(work, seen):
    waiting = asyncio.create_task(work)
    await asyncio.to_thread(seen)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("leave", [leave_the_block, cancel_the_task_that_reads, cancel_a_complete])
async def test_an_async_client_that_leaves_frees_its_blocks(running, seen, leave):
    async with AsyncClient(running.router_address) as client:
        await leave(client, seen)


def cancel_the_stream(client, stream):
    stream.cancel()


def close_the_client(client, stream):
    client.close()


def abort_by_name(client, stream):
    assert client.abort(stream.request_id)


@pytest.mark.parametrize("leave", [cancel_the_stream, close_the_client, abort_by_name])
def test_a_stream_that_another_thread_reads_is_left(running, seen, leave):
    with Client(running.router_address) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = client.generate(PROMPT, **ENDLESS)
        reading = pool.submit(list, stream)
        seen()
        leave(client, stream)
        reading.result(WAIT_SECONDS)
