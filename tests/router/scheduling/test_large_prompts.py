"""Prompts that few nodes have room for, and the requests behind them."""

from __future__ import annotations

import asyncio

import grpc

from tests.router.conftest import PATIENCE_SECONDS, read_rest


async def wait_for_queue(cluster, num_waiting):
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == num_waiting, what="queue")


async def test_what_fits_a_decode_node_that_is_away_is_not_called_too_large(node_pair):
    large, small = node_pair.decodes
    small.num_blocks = 8
    node_pair.pace(0.05)
    await node_pair.serve()
    prompt = {"text": "x" * 300, "max_tokens": 20}
    answer = asyncio.ensure_future(node_pair.generate(**prompt))
    await node_pair.until_streaming(1)
    await large.stop()
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 1)
    failure = await node_pair.fail(**prompt)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_NODE")
    assert failure.retry_seconds > 0
    await large.start()
    assert len((await asyncio.wait_for(answer, PATIENCE_SECONDS)).token_ids()) == 20
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 2)
    assert (await node_pair.generate(**prompt)).token_ids()
    large.num_blocks = 8
    failure = await node_pair.fail(**prompt)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE")


async def test_small_prompts_do_not_wait_for_a_large_one_that_no_node_has_room_for(node_pair, monkeypatch):
    monkeypatch.setattr("router.nodes.room.NO_ROOM_RETRY_SECONDS", 10 * PATIENCE_SECONDS)
    for node in node_pair.decodes:
        node.num_blocks = 30
    node_pair.pace(0.05)
    await node_pair.serve()
    running = [node_pair.stub.Generate(node_pair.request(text=text * 200, max_tokens=300)) for text in "ab"]
    for call in running:
        await call.read()
    large = node_pair.stub.Generate(node_pair.request(text="L" * 400, max_tokens=2))
    started = asyncio.ensure_future(large.read())
    await wait_for_queue(node_pair, 1)
    num_opened = node_pair.num_opened
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(node_pair.generate(text="short", max_tokens=2) for _ in range(6)))
    assert node_pair.num_opened == num_opened + 6, "the large one is sent to no node meanwhile"
    assert not started.done()
    running[0].cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await started
        await read_rest(large)
    for call in running:
        call.cancel()
