"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from outrider.answer import CompleteResult, Delta
from outrider.client.options import (
    GenerateOptions,
    Prompt,
    make_detokenize_request,
    make_request,
    set_prompt,
    to_duration,
    with_request_id,
)
from outrider.client.record import StreamRecord
from outrider.client.retry import ONE_ATTEMPT, Attempts, RetryPolicy
from outrider.client.sync import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS
from outrider.node import ClusterStatus, Model
from outrider.request import ChatMessage
from outrider.rpc.channels import open_channel
from outrider.rpc.credentials import TlsConfig, client_credentials
from outrider.rpc.status import from_rpc_error
from outrider.v1 import router_pb2, router_pb2_grpc
from outrider.wire.answer import complete_from_proto
from outrider.wire.cluster import cluster_from_proto, model_from_proto


class AsyncGenerateStream(StreamRecord):
    """Iterates over the Deltas of one request as they are verified. One reader.

    Iterating raises OutriderErrors. Leaving the `async with` block, or `cancel()`, stops
    the request on all nodes; iteration then just ends. (`break` alone would not: gRPC
    cancels nothing then.)
    """

    def __init__(
        self, open_call: Callable[[float | None], Any], *, request_id: str, target: str, attempts: Attempts
    ) -> None:
        super().__init__(request_id)
        self._open_call = open_call
        self._target = target
        self._attempts = attempts
        self._cancelled = asyncio.Event()
        self._call = open_call(attempts.remaining_seconds())

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
                        await self._try_again_after(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled.is_set() or (task is not None and task.cancelling()):
                raise  # it is the task that is cancelled, not this stream
        finally:
            self._call.cancel()

    async def _try_again_after(self, rpc_error: grpc.RpcError) -> None:
        """Waits and opens the next attempt. Raises: OutriderError when there is none."""
        error = from_rpc_error(rpc_error, target=self._target)
        seconds = self.next_attempt_after(error, self._attempts)
        if seconds is None:
            raise error from rpc_error
        try:
            async with asyncio.timeout(seconds):
                await self._cancelled.wait()
        except TimeoutError:
            self._call = self._open_call(self._attempts.remaining_seconds())

    def cancel(self) -> None:
        """Stops the request everywhere. Idempotent."""
        self._cancelled.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """A router's client for one event loop, with `Client`'s arguments. Raises OutriderErrors, nothing of gRPC's.

    Cancelling a task that waits for an answer stops the request on all nodes.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: TlsConfig | None = None,
        token: str | None = None,
        retry: RetryPolicy = ONE_ATTEMPT,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._retry = retry
        self._channel = open_channel(target, credentials=client_credentials(tls, token))
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerateStream:
        """Streams an answer."""
        return self.generate_message(make_request(prompt, options), timeout_seconds=options.get("timeout_seconds"))

    def generate_message(
        self,
        request: router_pb2.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerateStream:
        """Streams an answer to a message that was made elsewhere."""
        named = with_request_id(request)
        return AsyncGenerateStream(
            lambda seconds: self._stub.Generate(named, timeout=seconds, metadata=tuple(metadata)),
            request_id=named.request_id,
            target=self.target,
            attempts=Attempts(self._retry, timeout_seconds=timeout_seconds),
        )

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """The same answer at once, at the end."""
        request = with_request_id(make_request(prompt, options))
        return complete_from_proto(await self._call(self._stub.Complete, request, options.get("timeout_seconds")))

    async def abort(self, request_id: str) -> bool:
        """Stops a request everywhere. False: unknown or already finished."""
        request = router_pb2.AbortRequest(request_id=request_id)
        return bool((await self._call(self._stub.Abort, request, self._timeout_seconds)).aborted)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, add_generation_prompt: bool | None = None
    ) -> list[int]:
        request = router_pb2.TokenizeRequest()
        set_prompt(request, prompt, add_generation_prompt=add_generation_prompt)
        return list((await self._call(self._stub.Tokenize, request, self._timeout_seconds)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        request = make_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request, self._timeout_seconds)).text)

    async def model(self) -> Model:
        request = router_pb2.GetModelRequest()
        return model_from_proto(await self._call(self._stub.GetModel, request, self._timeout_seconds))

    async def watch_cluster(self, *, interval_seconds: float = 1.0) -> AsyncGenerator[ClusterStatus, None]:
        """The cluster now, then again at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        call = self._stub.WatchCluster(request)
        try:
            while True:
                response = await call.read()
                if not isinstance(response, router_pb2.WatchClusterResponse):  # grpc.aio.EOF
                    return
                yield cluster_from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.target) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancels what runs, and disconnects."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_seconds: float | None) -> Any:
        attempts = Attempts(self._retry, timeout_seconds=timeout_seconds)
        while True:
            try:
                return await method(request, timeout=attempts.remaining_seconds())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, target=self.target)
                seconds = attempts.next_after(error)
                if seconds is None:
                    raise error from rpc_error
            await asyncio.sleep(seconds)
