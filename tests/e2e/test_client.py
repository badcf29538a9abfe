"""The decode node frees a request's blocks, in whatever way its client leaves. tests/client has the other tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools

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
    """seen() waits until the decode node runs a request. Steps are held, so that no answer ends before the test does.

    The node holds nothing at the beginning and at the end.
    """
    running.wait_until_nothing_is_held()
    with running.held_steps():
        yield functools.partial(running.wait_for, holds_blocks, what="a running sequence")
    running.wait_until_nothing_is_held()


async def leave_the_block(client, running, seen):
    async with client.generate(PROMPT, **ENDLESS) as stream:
        first = asyncio.create_task(anext(aiter(stream)))
        await asyncio.to_thread(running.release_steps_until, first.done)
        assert (await first).token_ids
        await asyncio.to_thread(seen)


async def cancel_the_task_that_reads(client, running, seen):
    async def read():
        async for _ in client.generate(PROMPT, **ENDLESS):
            pass

    await cancel_the_task(read(), seen)


async def cancel_a_complete(client, running, seen):
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
        await leave(client, running, seen)


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
