"""An internal error in one request ends that request only."""

from __future__ import annotations

import asyncio

import grpc

from tests.router.conftest import PATIENCE_SECONDS

LONG = 300


class BrokenText:
    """A detokenizer that fails after some tokens."""

    is_mid_character = False

    def __init__(self, num_good):
        self._num_left = num_good

    def append(self, token_id):
        self._num_left -= 1
        if self._num_left < 0:
            raise KeyError(token_id)
        return "x"

    def finish(self):
        return ""


async def test_a_detokenizer_that_fails_ends_its_own_request_only(cluster):
    cluster.decode.step_seconds = 0.02  # slow, so that the other requests still run when it fails
    await cluster.serve()
    session = cluster.service.nodes.decode_nodes[0].session
    others = [asyncio.ensure_future(cluster.generate(seed=seed, max_tokens=LONG)) for seed in range(2)]
    await cluster.eventually(lambda: len(cluster.decode.groups) == len(others))
    tokenizer = cluster.service.nodes.model().tokenizer
    make = tokenizer.detokenizer
    tokenizer.detokenizer = lambda **_: BrokenText(3)
    messages = []
    call = cluster.stub.Generate(cluster.request(max_tokens=LONG), timeout=PATIENCE_SECONDS)
    try:
        messages = [message async for message in call]
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INTERNAL  # noqa: PT017 what came before it does not matter
    assert not messages, "it ended by an error"
    tokenizer.detokenizer = make
    assert not any(other.done() for other in others)
    cluster.decode.step_seconds = 0.0
    for answer in await asyncio.gather(*others):
        assert len(answer.token_ids()) == LONG
        assert answer.summary.metrics.attempts == 1
    assert cluster.service.nodes.decode_nodes[0].session is session
    await cluster.is_empty()
