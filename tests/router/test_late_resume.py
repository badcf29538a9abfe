"""Resumes that hear late of what became of their request."""

from __future__ import annotations

import asyncio

from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS, told
from tests.router.test_take_over_races import gated, pair, read_on  # noqa: F401 pair is a fixture
from tests.support.router_fakes.decode_node import letters


async def test_a_resume_that_hears_late_of_a_take_over_leaves_the_request_that_came_back(pair, monkeypatch):  # noqa: F811 the fixture
    await pair.serve()
    pair.first.decode.step_seconds = 0.05
    await pair.begin(num_deltas=2)
    renewal = gated(pair.stores[0], "renew")
    await renewal.until_entered()
    assert (await pair.resume_call().read()).HasField("started")
    read, has_read, may_return = pair.stores[0].read, asyncio.Event(), asyncio.Event()

    async def read_slowly(key):
        stored = await read(key)
        has_read.set()
        await may_return.wait()
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(pair.stores[0], "read", read_slowly)
        request = router_pb2.ResumeRequest(request_id="r")
        late = pair.first.stub.Resume(request, timeout=PATIENCE_SECONDS)
        await asyncio.wait_for(has_read.wait(), PATIENCE_SECONDS)
    back = pair.first.stub.Resume(request, timeout=PATIENCE_SECONDS)
    assert (await back.read()).HasField("started")
    may_return.set()
    assert (await late.read()).HasField("started")
    renewal.open()
    pair.first.decode.step_seconds = 0.0
    assert told(await read_on(late)) == letters(pair.first.decode.opened[0], 0)
