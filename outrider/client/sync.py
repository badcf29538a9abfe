"""The synchronous client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

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
from outrider.node import ClusterStatus, Model
from outrider.request import ChatMessage
from outrider.rpc.channels import open_sync_channel
from outrider.rpc.credentials import TlsConfig, client_credentials
from outrider.rpc.status import from_rpc_error
from outrider.v1 import router_pb2, router_pb2_grpc
from outrider.wire.answer import complete_from_proto
from outrider.wire.cluster import cluster_from_proto, model_from_proto

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS = 30.0
"""For the calls that answer at once; generation has no limit unless asked for."""


class GenerateStream(StreamRecord):
    """Iterates over the Deltas of one request as they are verified. One reader; `cancel` from any thread.

    Iterating raises OutriderErrors. Leaving the `with` block, or `cancel()`, stops the
    request on all nodes; iteration then just ends.
    """

    def __init__(
        self, open_call: Callable[[float | None], Any], *, request_id: str, target: str, attempts: Attempts
    ) -> None:
        super().__init__(request_id)
        self._open_call = open_call
        self._target = target
        self._attempts = attempts
        self._cancelled = threading.Event()
        self._call = open_call(attempts.remaining_seconds())

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._cancelled.is_set():
                try:
                    yield from self._read_call()
                except grpc.RpcError as error:
                    if not self._cancelled.is_set():
                        self._try_again_after(error)
                else:
                    return
        finally:
            self._call.cancel()

    def _read_call(self) -> Iterator[Delta]:
        for event in self._call:
            delta = self.take(event)
            if delta is not None:
                yield delta

    def _try_again_after(self, rpc_error: grpc.RpcError) -> None:
        """Waits and opens the next attempt. Raises: OutriderError when there is none."""
        error = from_rpc_error(rpc_error, target=self._target)
        seconds = self.next_attempt_after(error, self._attempts)
        if seconds is None:
            raise error from rpc_error
        if self._cancelled.wait(seconds):
            return
        self._call = self._open_call(self._attempts.remaining_seconds())
        if self._cancelled.is_set():  # meanwhile: `cancel` has seen the call before
            self._call.cancel()

    def cancel(self) -> None:
        """Stops the request everywhere. Idempotent."""
        self._cancelled.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A router's client. Thread-safe. Raises OutriderErrors, nothing of gRPC's.

    `tls=None` is plaintext, `tls=TlsConfig()` TLS that trusts the system's authorities.
    `token` goes with every call as `authorization: Bearer …` and needs TLS. `retry` says
    which failed calls are made again; without it none is. `timeout_seconds` is for the
    calls that answer at once; a request's own is an option of `generate` and `complete`,
    and holds for all of its attempts together.

    Raises: ConfigError for a file of `tls` that cannot be read, and for a token without TLS.
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
        self._closed = threading.Event()
        self._channel = open_sync_channel(target, credentials=client_credentials(tls, token))
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Streams an answer."""
        request = with_request_id(make_request(prompt, options))
        return GenerateStream(
            lambda seconds: self._stub.Generate(request, timeout=seconds),
            request_id=request.request_id,
            target=self.target,
            attempts=Attempts(self._retry, timeout_seconds=options.get("timeout_seconds")),
        )

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """The same answer at once, at the end."""
        request = with_request_id(make_request(prompt, options))
        return complete_from_proto(self._call(self._stub.Complete, request, options.get("timeout_seconds")))

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
        return model_from_proto(self._call(self._stub.GetModel, router_pb2.GetModelRequest(), self._timeout_seconds))

    def watch_cluster(self, *, interval_seconds: float = 1.0) -> Generator[ClusterStatus, None, None]:
        """The cluster now, then again at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        call = self._stub.WatchCluster(request)
        try:
            for response in call:
                yield cluster_from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self.target) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Cancels what runs, and disconnects."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_seconds: float | None) -> Any:
        attempts = Attempts(self._retry, timeout_seconds=timeout_seconds)
        while True:
            try:
                return method(request, timeout=attempts.remaining_seconds())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, target=self.target)
                seconds = attempts.next_after(error)
                if seconds is None or self._closed.wait(seconds):
                    raise error from rpc_error
