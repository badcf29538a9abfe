"""The asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from outrider.answer import CompleteResult, Delta
from outrider.client.base import ABORT_SECONDS, ADAPTER_TIMEOUT_SECONDS, BaseClient, BaseStream
from outrider.client.options import (
    ChatOptions,
    GenerateOptions,
    Prompt,
    make_detokenize_request,
    make_request,
    set_prompt,
    to_duration,
    with_request_id,
)
from outrider.client.retry import Attempts
from outrider.errors import PeerLostError
from outrider.node import ClusterStatus, Model
from outrider.request import Adapter, ChatMessage
from outrider.rpc.channels import open_channel
from outrider.rpc.status import UNREACHABLE, from_rpc_error
from outrider.v1 import router_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.answer import complete_from_proto
from outrider.wire.cluster import CLUSTER, MODEL


class AsyncGenerateStream(BaseStream):
    """Iterates over the Deltas of one request as they are verified. Only one task may read it.

    A request with a resume window continues as in `GenerateStream`. Iterating raises
    OutriderErrors. Leaving the `async with` block, or `cancel()`, stops the request on all
    nodes, and the iteration ends. (`break` alone does not, because gRPC does not cancel the call.)
    """

    _cancelled: asyncio.Event
    _make_event = asyncio.Event
    _aborting: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while not self._cancelled.is_set():
                try:
                    while True:
                        event = await self._call.read()
                        if not isinstance(event, router_pb2.GenerateResponse):  # grpc.aio.EOF
                            return
                        delta = self.take(event)
                        if delta is not None:
                            yield delta
                except grpc.RpcError as error:
                    if not self._cancelled.is_set():
                        await self._continue_after(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled.is_set() or (task is not None and task.cancelling()):
                raise  # the task was cancelled, not this stream
        finally:
            self.cancel()

    async def _continue_after(self, rpc_error: grpc.RpcError) -> None:
        """Waits, and opens the next call. Raises: OutriderError if the stream cannot continue."""
        step = self._next_step(rpc_error)
        try:
            async with asyncio.timeout(step.pause_seconds):
                await self._cancelled.wait()
        except TimeoutError:
            self._call = self._open()

    async def trailers(self) -> dict[str, str]:
        """Waits for the last call's end and returns its trailers (docs/protocol.md), none if the call was cancelled."""
        return {key: value for key, value in await self._call.trailing_metadata() if isinstance(value, str)}

    def cancel(self) -> None:
        """Stops the request on all nodes. Idempotent."""
        was_cancelled = self._cancelled.is_set()
        self._cancelled.set()
        self._call.cancel()
        if not was_cancelled and self._continuation.needs_abort:
            self._aborting = asyncio.create_task(self._abort(self.request_id))

    async def wait_stopped(self) -> None:
        """Waits after `cancel` until a router has confirmed that the request is stopped, or no router can be asked."""
        if self._aborting is not None:
            await self._aborting

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.cancel()
        await self.wait_stopped()


class AsyncClient(BaseClient[AsyncGenerateStream]):
    """An asynchronous client with the arguments of `Client`, for one event loop.

    Raises OutriderErrors, not gRPC errors.

    Cancelling a task that waits for an answer stops the request on all nodes.
    """

    _make_stream = AsyncGenerateStream
    _open_channel = staticmethod(open_channel)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """Generates an answer, and returns it when it is complete."""
        request = with_request_id(make_request(prompt, options))
        return complete_from_proto(await self._call("Complete", request, options.get("timeout_seconds")))

    async def abort(self, request_id: str) -> bool:
        """Stops a request on all nodes. Returns False if it is unknown or already finished."""
        request = router_pb2.AbortRequest(request_id=request_id)
        lost: list[PeerLostError] = []
        for target in self._targets.in_order():  # without a shared store, each router knows only its own requests
            try:
                if (await self._call("Abort", request, self._timeout_seconds, only=target)).aborted:
                    return True
            except PeerLostError as error:
                lost.append(error)
        if len(lost) == len(self._targets):
            raise lost[0]
        return False

    async def tokenize(self, prompt: str | Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> list[int]:
        request = router_pb2.TokenizeRequest()
        set_prompt(request, prompt, **options)
        return list((await self._call("Tokenize", request, self._timeout_seconds)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        request = make_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call("Detokenize", request, self._timeout_seconds)).text)

    async def model(self) -> Model:
        request = router_pb2.GetModelRequest()
        return MODEL.from_proto(await self._call("GetModel", request, self._timeout_seconds))

    async def load_adapter(
        self, name: str, directory: str, *, timeout_seconds: float = ADAPTER_TIMEOUT_SECONDS
    ) -> Adapter:
        """Loads an adapter (LoRA) on all nodes, from a directory below their `model.adapter_directory`."""
        request = router_pb2.LoadAdapterRequest(name=name, directory=directory)
        return ADAPTER.from_proto((await self._call("LoadAdapter", request, timeout_seconds)).adapter)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter from all nodes."""
        await self._call("UnloadAdapter", router_pb2.UnloadAdapterRequest(name=name), self._timeout_seconds)

    async def watch_cluster(self, *, interval_seconds: float = 1.0) -> AsyncGenerator[ClusterStatus, None]:
        """Yields the cluster's status now and at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        target = self._targets.current
        call = self._stubs[target].WatchCluster(request)
        try:
            while True:
                response = await call.read()
                if not isinstance(response, router_pb2.WatchClusterResponse):  # grpc.aio.EOF
                    return
                yield CLUSTER.from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=target) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancels all streams and disconnects."""
        for stream in list(self._streams):
            stream.cancel()
            await stream.wait_stopped()
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _abort_anywhere(self, request_id: str) -> None:
        """Asks routers in turn to abort a request, until one has done so. A router that cannot be reached drops
        the request when the resume window ends.
        """
        request = router_pb2.AbortRequest(request_id=request_id)
        for target in self._targets.in_order():
            with contextlib.suppress(grpc.RpcError):
                if (await self._stubs[target].Abort(request, timeout=ABORT_SECONDS)).aborted:
                    return

    async def _call(self, method: str, request: Any, timeout_seconds: float | None, *, only: str | None = None) -> Any:
        attempts = Attempts(self._retry, timeout_seconds=timeout_seconds)
        while True:
            for target in self._targets.in_order() if only is None else (only,):
                try:
                    call = getattr(self._stubs[target], method)(request, timeout=attempts.remaining_seconds())
                    response = await call
                except grpc.RpcError as rpc_error:
                    error, cause = from_rpc_error(rpc_error, target=target), rpc_error
                    if error.reason != UNREACHABLE:
                        break
                else:
                    self._targets.current = target
                    return response
            seconds = attempts.next_after(error)
            if seconds is None:
                raise error from cause
            await asyncio.sleep(seconds)
