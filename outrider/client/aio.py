"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from outrider.answer import Delta
from outrider.client.messages import read_cluster, read_complete, read_model
from outrider.client.options import (
    GenerateOptions,
    Prompt,
    make_detokenize_request,
    make_request,
    set_prompt,
    to_duration,
)
from outrider.client.record import StreamRecord
from outrider.client.sync import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS
from outrider.client.values import ChatMessage, ClusterStatus, CompleteResult, Model
from outrider.service.channels import open_channel
from outrider.service.config import TlsConfig
from outrider.service.status import from_rpc_error
from outrider.v1 import router_pb2, router_pb2_grpc


class AsyncGenerateStream(StreamRecord):
    """Iterates over the Deltas of one request as they are verified. One reader.

    Iterating raises OutriderErrors. Leaving the `async with` block, or `cancel()`, stops
    the request on all nodes; iteration then just ends. (`break` alone would not: gRPC
    cancels nothing then.)
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._target = target
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                event = await self._call.read()
                if not isinstance(event, router_pb2.GenerateResponse):  # grpc.aio.EOF
                    return
                delta = self.take(event)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._target) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_cancelled or (task is not None and task.cancelling()):
                raise  # it is the task that is cancelled, not this stream
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Stops the request everywhere. Idempotent."""
        self._is_cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """A router's client for one event loop. Raises OutriderErrors, nothing of gRPC's."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: TlsConfig | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._channel = open_channel(target, tls=tls)
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
        call = self._stub.Generate(request, timeout=timeout_seconds, metadata=tuple(metadata))
        return AsyncGenerateStream(call, self.target)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """The same answer at once, at the end."""
        request = make_request(prompt, options)
        return read_complete(await self._call(self._stub.Complete, request, options.get("timeout_seconds")))

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
        return read_model(await self._call(self._stub.GetModel, request, self._timeout_seconds))

    async def watch_cluster(self, *, interval_seconds: float = 1.0) -> AsyncGenerator[ClusterStatus, None]:
        """The cluster now, then again at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        call = self._stub.WatchCluster(request)
        try:
            while True:
                response = await call.read()
                if not isinstance(response, router_pb2.WatchClusterResponse):  # grpc.aio.EOF
                    return
                yield read_cluster(response)
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
        try:
            return await method(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.target) from error
