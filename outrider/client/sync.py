"""The synchronous client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Self, Unpack

import grpc

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
from outrider.rpc.channels import open_sync_channel
from outrider.rpc.status import UNREACHABLE, from_rpc_error
from outrider.v1 import router_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.answer import complete_from_proto
from outrider.wire.cluster import CLUSTER, MODEL


class GenerateStream(BaseStream):
    """Iterates over the Deltas of one request as they are verified. Only one thread may read it; any may call `cancel`.

    If its connection breaks or its router is lost, a request with a resume window continues on
    any available router, without gaps or repeats. Iterating raises OutriderErrors. Leaving the
    `with` block, or `cancel()`, stops the request on all nodes, and the iteration ends.
    """

    _cancelled: threading.Event
    _make_event = threading.Event

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._cancelled.is_set():
                try:
                    for event in self._call:
                        delta = self.take(event)
                        if delta is not None:
                            yield delta
                except grpc.RpcError as error:
                    if not self._cancelled.is_set():
                        self._continue_after(error)
                else:
                    return
        finally:
            self.cancel()

    def _continue_after(self, rpc_error: grpc.RpcError) -> None:
        """Waits, and opens the next call. Raises: OutriderError if the stream cannot continue."""
        step = self._next_step(rpc_error)
        if self._cancelled.wait(step.pause_seconds):
            return
        self._call = self._open()
        if self._cancelled.is_set():  # was set meanwhile, so `cancel` only cancelled the previous call
            self._call.cancel()

    def trailers(self) -> dict[str, str]:
        """Waits for the last call's end and returns its trailers (docs/protocol.md), none if the call was cancelled."""
        return {key: value for key, value in self._call.trailing_metadata() or () if isinstance(value, str)}

    def cancel(self) -> None:
        """Stops the request on all nodes. Idempotent."""
        was_cancelled = self._cancelled.is_set()
        self._cancelled.set()
        self._call.cancel()
        if not was_cancelled and self._continuation.needs_abort:
            self._abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.cancel()


class Client(BaseClient[GenerateStream]):
    """A client of one router, or of several with the same nodes. Thread-safe. Raises OutriderErrors, not gRPC errors.

    `target` is "host:port", or several of them as a sequence or separated by commas. With
    several, calls go to the one that answered last, or to the next one if that cannot be reached.
    Streams of `generate` then have a resume window, so that they survive the loss of a router.

    `tls=None` means plaintext; `tls=TlsConfig()` means TLS that trusts the system's authorities.
    `token` is sent with every call as `authorization: Bearer …` and requires TLS. `retry`
    decides which failed calls are repeated; by default, none are. `timeout_seconds` applies to
    calls that answer at once. A request's own timeout is an option of `generate` and
    `complete`, and covers all of its attempts together.

    Raises: ConfigError for a file of `tls` that cannot be read, and for a token without TLS;
    ValueError if there is no target, or if a timeout, here or of a request, is not above 0.
    """

    _make_stream = GenerateStream
    _open_channel = staticmethod(open_sync_channel)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """Generates an answer, and returns it when it is complete."""
        request = with_request_id(make_request(prompt, options))
        return complete_from_proto(self._call("Complete", request, options.get("timeout_seconds")))

    def abort(self, request_id: str) -> bool:
        """Stops a request on all nodes. Returns False if it is unknown or already finished."""
        request = router_pb2.AbortRequest(request_id=request_id)
        lost: list[PeerLostError] = []
        for target in self._targets.in_order():  # without a shared store, each router knows only its own requests
            try:
                if self._call("Abort", request, self._timeout_seconds, only=target).aborted:
                    return True
            except PeerLostError as error:
                lost.append(error)
        if len(lost) == len(self._targets):
            raise lost[0]
        return False

    def tokenize(self, prompt: str | Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> list[int]:
        request = router_pb2.TokenizeRequest()
        set_prompt(request, prompt, **options)
        return list(self._call("Tokenize", request, self._timeout_seconds).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        request = make_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request, self._timeout_seconds).text)

    def model(self) -> Model:
        return MODEL.from_proto(self._call("GetModel", router_pb2.GetModelRequest(), self._timeout_seconds))

    def load_adapter(self, name: str, directory: str, *, timeout_seconds: float = ADAPTER_TIMEOUT_SECONDS) -> Adapter:
        """Loads an adapter (LoRA) on all nodes, from a directory below their `model.adapter_directory`."""
        request = router_pb2.LoadAdapterRequest(name=name, directory=directory)
        return ADAPTER.from_proto(self._call("LoadAdapter", request, timeout_seconds).adapter)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter from all nodes."""
        self._call("UnloadAdapter", router_pb2.UnloadAdapterRequest(name=name), self._timeout_seconds)

    def watch_cluster(self, *, interval_seconds: float = 1.0) -> Generator[ClusterStatus, None, None]:
        """Yields the cluster's status now and at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        target = self._targets.current
        call = self._stubs[target].WatchCluster(request)
        try:
            for response in call:
                yield CLUSTER.from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=target) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Cancels all streams and disconnects."""
        self._closed.set()
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _abort_anywhere(self, request_id: str) -> None:
        """Asks routers in turn to abort a request, until one has done so. A router that cannot be reached drops
        the request when the resume window ends.
        """
        request = router_pb2.AbortRequest(request_id=request_id)
        for target in self._targets.in_order():
            with contextlib.suppress(grpc.RpcError):
                if self._stubs[target].Abort(request, timeout=ABORT_SECONDS).aborted:
                    return

    def _call(self, method: str, request: Any, timeout_seconds: float | None, *, only: str | None = None) -> Any:
        attempts = Attempts(self._retry, timeout_seconds=timeout_seconds)
        while True:
            for target in self._targets.in_order() if only is None else (only,):
                try:
                    response = getattr(self._stubs[target], method)(request, timeout=attempts.remaining_seconds())
                except grpc.RpcError as rpc_error:
                    error, cause = from_rpc_error(rpc_error, target=target), rpc_error
                    if error.reason != UNREACHABLE:
                        break
                else:
                    self._targets.current = target
                    return response
            seconds = attempts.next_after(error)
            if seconds is None or self._closed.wait(seconds):
                raise error from cause
