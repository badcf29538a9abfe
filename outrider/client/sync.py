"""The synchronous client."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

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
from outrider.client.values import ChatMessage, ClusterStatus, CompleteResult, Model
from outrider.service.channels import open_sync_channel
from outrider.service.config import TlsConfig
from outrider.service.status import from_rpc_error
from outrider.v1 import router_pb2, router_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS = 30.0
"""For the calls that answer at once; generation has no limit unless asked for."""


class GenerateStream(StreamRecord):
    """Iterates over the Deltas of one request as they are verified. One reader; `cancel` from any thread.

    Iterating raises OutriderErrors. Leaving the `with` block, or `cancel()`, stops the
    request on all nodes; iteration then just ends.
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._target = target
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        try:
            for event in self._call:
                delta = self.take(event)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            if not self._is_cancelled:
                raise from_rpc_error(error, target=self._target) from error
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Stops the request everywhere. Idempotent."""
        self._is_cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A router's client. Thread-safe. Raises OutriderErrors, nothing of gRPC's."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: TlsConfig | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._channel = open_sync_channel(target, tls=tls)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Streams an answer."""
        request = make_request(prompt, options)
        return GenerateStream(self._stub.Generate(request, timeout=options.get("timeout_seconds")), self.target)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """The same answer at once, at the end."""
        request = make_request(prompt, options)
        return read_complete(self._call(self._stub.Complete, request, options.get("timeout_seconds")))

    def abort(self, request_id: str) -> bool:
        """Stops a request everywhere. False: unknown or already finished."""
        request = router_pb2.AbortRequest(request_id=request_id)
        return bool(self._call(self._stub.Abort, request, self._timeout_seconds).aborted)

    def tokenize(self, prompt: str | Sequence[ChatMessage], *, add_generation_prompt: bool | None = None) -> list[int]:
        request = router_pb2.TokenizeRequest()
        set_prompt(request, prompt, add_generation_prompt=add_generation_prompt)
        return list(self._call(self._stub.Tokenize, request, self._timeout_seconds).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        request = make_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request, self._timeout_seconds).text)

    def model(self) -> Model:
        return read_model(self._call(self._stub.GetModel, router_pb2.GetModelRequest(), self._timeout_seconds))

    def watch_cluster(self, *, interval_seconds: float = 1.0) -> Generator[ClusterStatus, None, None]:
        """The cluster now, then again at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        call = self._stub.WatchCluster(request)
        try:
            for response in call:
                yield read_cluster(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.target) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Cancels what runs, and disconnects."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_seconds: float | None) -> Any:
        try:
            return method(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.target) from error
