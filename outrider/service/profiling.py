"""Profiling of a running node: the server's side, and the client's request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio

from outrider.errors import AbortedError, AlreadyRunningError, NotSupportedError, OutriderError, PeerLostError
from outrider.profile import Capture, Captured, EndProfile, Profile, ProfileOptions, StartProfile
from outrider.rpc.status import from_rpc_error
from outrider.v1 import node_pb2_grpc
from outrider.wire.profile import PROFILE, options_to_proto

END_SECONDS = 30.0
"""Maximum seconds for an engine to finish the current step, close the trace and return the profile."""
EXPORT_SECONDS = 60.0


class ProfileDesk:
    """Runs one profile at a time. Event loop only; `submit` sends commands to the engine thread."""

    def __init__(
        self,
        *,
        can_be_traced: Callable[[], bool],
        node_name: Callable[[], str],
        submit: Callable[[StartProfile | EndProfile], None],
    ) -> None:
        """`can_be_traced` returns whether torch's profiler would see the engine's forward passes."""
        self._can_be_traced = can_be_traced
        self._node_name = node_name
        self._submit = submit
        self._is_running = False

    async def run(self, options: ProfileOptions) -> tuple[Profile, bytes]:
        """Returns the figures captured in the given time, and a trace (may be empty). Cancellation ends the profile.

        Raises: NotSupportedError; AlreadyRunningError; AbortedError if the engine does not return the profile.
        """
        if options.num_traced_steps and not self._can_be_traced():
            message = "native kernels compute on this node, and a trace is torch's: the table has the kernels' phases"
            raise NotSupportedError(message, reason="NOT_TRACED")
        if self._is_running:
            raise AlreadyRunningError(f"{self._node_name()} is being profiled already", reason="PROFILE_RUNNING")
        self._is_running = True
        started_at = time.monotonic()
        try:
            captured, timed_out = await self._capture(options)
            seconds = time.monotonic() - started_at
            trace = await asyncio.to_thread(captured.export_trace) if captured.export_trace else b""
        finally:
            self._is_running = False
        return replace(captured.profile, node=self._node_name(), seconds=seconds, timed_out=timed_out), trace

    async def _capture(self, options: ProfileOptions) -> tuple[Captured, bool]:
        """Returns what the engine captured, and whether the time ran out. Raises: AbortedError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Captured] = loop.create_future()
        capture = Capture(options, lambda captured: loop.call_soon_threadsafe(_settle, done, captured))
        self._submit(StartProfile(capture))
        try:
            await asyncio.wait((done,), timeout=options.timeout_seconds)
            timed_out = not done.done()
        finally:
            self._submit(EndProfile(capture))  # even if the caller has left; harmless if the profile has ended
        try:
            async with asyncio.timeout(END_SECONDS):
                return await done, timed_out
        except TimeoutError as error:
            raise AbortedError(
                f"{self._node_name()}: the current step takes too long", reason="STEP_TOO_LONG"
            ) from error


async def fetch_profile(channel: grpc.aio.Channel, options: ProfileOptions, *, target: str) -> tuple[Profile, bytes]:
    """Requests a profile of a node. Returns the figures and a gzipped Chrome trace, which may be empty.

    Raises: the node's error; PeerLostError if it does not answer in time.
    """
    call = node_pb2_grpc.NodeServiceStub(channel).Profile(
        options_to_proto(options), timeout=options.timeout_seconds + END_SECONDS + EXPORT_SECONDS
    )
    profile: Profile | None = None
    trace = bytearray()
    try:
        async for chunk in call:
            if chunk.WhichOneof("chunk") == "summary":
                profile = PROFILE.from_proto(chunk.summary)
            trace.extend(chunk.trace)
    except grpc.RpcError as error:
        raise _explained(error, target) from error
    except ValueError as error:
        raise PeerLostError(f"{target}: {error}", node=target) from error
    finally:
        call.cancel()
    if profile is None:
        raise PeerLostError(f"{target} sent no profile", node=target)
    return profile, bytes(trace)


def _explained(error: grpc.RpcError, target: str) -> OutriderError:
    found = from_rpc_error(error, target=target)
    if isinstance(found, NotSupportedError) and found.reason == NotSupportedError.reason:  # gRPC's own status
        return NotSupportedError(f"{target} is not a node that can be profiled: {found.message}", reason="NOT_A_NODE")
    return found


def _settle(done: asyncio.Future[Captured], captured: Captured) -> None:
    if not done.done():
        done.set_result(captured)
