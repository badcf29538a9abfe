"""Profiles requested over gRPC, of an engine that the test drives."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import grpc.aio
import pytest

from outrider.errors import AlreadyRunningError, InvalidRequestError, NotSupportedError, PeerLostError
from outrider.node import NodeState
from outrider.profile import (
    Captured,
    EndProfile,
    Profile,
    ProfiledStep,
    ProfileOptions,
    StartProfile,
    StepKind,
)
from outrider.rpc.channels import open_channel
from outrider.service.node_service import NodeServicer
from outrider.service.profiling import ProfileDesk, fetch_profile
from outrider.v1 import node_pb2_grpc
from tests.service.conftest import INFO, REPORT

PATIENCE_SECONDS = 30.0
TRACE = os.urandom(3_000_000)


def step(kind=StepKind.DECODE, **nanoseconds):
    nanoseconds = nanoseconds or {"schedule": 1_000_000, "forward.linear": 3_000_000}
    return ProfiledStep(kind=kind, num_rows=1, num_sequences=1, nanoseconds=nanoseconds, event_loop_nanoseconds=500_000)


class Engine:
    """Takes commands as an engine thread would."""

    def __init__(self):
        self.commands: asyncio.Queue = asyncio.Queue()

    async def next(self, kind):
        command = await asyncio.wait_for(self.commands.get(), PATIENCE_SECONDS)
        assert isinstance(command, kind)
        return command.capture

    async def profile(self, *steps, num_traced_steps=0, trace=None):
        capture = await self.next(StartProfile)
        capture.on_done(
            Captured(
                Profile(
                    steps=steps, num_traced_steps=num_traced_steps, kv_bytes_per_token=640, feature_bytes_per_token=32
                ),
                None if trace is None else lambda: trace,
            )
        )
        await self.next(EndProfile)
        return capture


class Served:
    def __init__(self):
        self.engine = Engine()
        self.state = NodeState.SERVING
        self.server = grpc.aio.server()
        self.channel = None

    async def start(self, *, can_be_traced=True):
        desk = ProfileDesk(
            can_be_traced=lambda: can_be_traced,
            node_name=lambda: "decode@x",
            submit=self.engine.commands.put_nowait,
        )
        servicer = NodeServicer(lambda: replace(INFO, state=self.state), lambda: REPORT, profiles=desk)
        node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = open_channel(f"127.0.0.1:{port}")
        return self

    def fetch(self, **options):
        return asyncio.create_task(fetch_profile(self.channel, ProfileOptions(**options), target="decode@x"))


@pytest.fixture
async def served():
    served = Served()
    yield served
    if served.channel is not None:
        await served.channel.close()
        await served.server.stop(0)


async def test_a_profile_and_its_trace_arrive_whole(served):
    await served.start()
    fetching = served.fetch(num_steps=2, num_traced_steps=1)
    steps = (step(StepKind.VERIFY), step(idle=5, emit=7))
    capture = await served.engine.profile(*steps, num_traced_steps=1, trace=TRACE)
    assert capture.options == ProfileOptions(num_steps=2, num_traced_steps=1)
    profile, trace = await fetching
    assert profile.steps == steps
    assert (profile.node, profile.num_traced_steps, profile.timed_out) == ("decode@x", 1, False)
    assert (profile.kv_bytes_per_token, profile.feature_bytes_per_token) == (640, 32)
    assert trace == TRACE


async def test_an_idle_node_gives_what_it_has_when_the_time_is_over(served):
    await served.start()
    fetching = served.fetch(num_steps=5, timeout_seconds=0.2)
    capture = await served.engine.next(StartProfile)
    assert await served.engine.next(EndProfile) is capture
    capture.on_done(Captured(Profile(steps=(step(),))))
    profile, trace = await fetching
    assert profile.timed_out
    assert len(profile.steps) == 1
    assert trace == b""


async def test_one_profile_at_a_time_and_one_that_nobody_waits_for_is_over(served):
    await served.start()
    first = served.fetch()
    capture = await served.engine.next(StartProfile)
    with pytest.raises(AlreadyRunningError, match="decode@x is being profiled already"):
        await served.fetch()
    first.cancel()
    assert await served.engine.next(EndProfile) is capture
    second = served.fetch()
    await served.engine.profile(step())
    assert len((await second)[0].steps) == 1


async def test_a_node_without_torch_says_that_it_has_no_trace(served):
    await served.start(can_be_traced=False)
    with pytest.raises(NotSupportedError, match="native kernels compute on this node") as caught:
        await served.fetch(num_traced_steps=1)
    assert caught.value.reason == "NOT_TRACED"
    assert served.engine.commands.empty()
    untraced = served.fetch()
    await served.engine.profile(step())
    assert len((await untraced)[0].steps) == 1


async def test_a_node_that_loads_its_weights_is_asked_again_later(served):
    served.state = NodeState.STARTING
    await served.start()
    with pytest.raises(PeerLostError, match="does not serve"):
        await served.fetch()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"num_traced_steps": 201}, "num_traced_steps"),
        ({"timeout_seconds": 601.0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
    ],
)
def test_options_out_of_range_name_their_field(options, field):
    with pytest.raises(InvalidRequestError) as caught:
        ProfileOptions(**options)
    assert caught.value.field == field
