"""The synchronous client."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from outrider.answer import CompleteResult, Delta
from outrider.client.asked import Asked
from outrider.client.continuation import Continuation, Step
from outrider.client.options import (
    DEFAULT_RESUME_WINDOW_SECONDS,
    GenerateOptions,
    Prompt,
    make_detokenize_request,
    make_request,
    set_prompt,
    to_duration,
    with_request_id,
    with_resume_window,
)
from outrider.client.record import StreamRecord
from outrider.client.retry import ONE_ATTEMPT, Attempts, RetryPolicy
from outrider.client.targets import DEFAULT_TARGET, Targets
from outrider.errors import OutriderError, PeerLostError
from outrider.node import ClusterStatus, Model
from outrider.request import ChatMessage
from outrider.rpc.channels import open_sync_channel
from outrider.rpc.credentials import TlsConfig, client_credentials
from outrider.rpc.status import UNREACHABLE, from_rpc_error
from outrider.v1 import router_pb2, router_pb2_grpc
from outrider.wire.answer import complete_from_proto
from outrider.wire.cluster import cluster_from_proto, model_from_proto

DEFAULT_TIMEOUT_SECONDS = 30.0
"""For the calls that answer at once; generation has no limit unless asked for."""
ABORT_SECONDS = 1.0
"""How long the end of a stream may wait for a router to say that it has stopped the request."""


class GenerateStream(StreamRecord):
    """Iterates over the Deltas of one request as they are verified. One reader; `cancel` from any thread.

    A request with a resume window goes on when its connection breaks or its router is lost,
    on whichever router there is: nothing is missing, nothing comes twice. Iterating raises
    OutriderErrors. Leaving the `with` block, or `cancel()`, stops the request on all nodes;
    iteration then just ends.
    """

    def __init__(
        self,
        asked: Asked,
        *,
        open_call: Callable[[Step, float | None], Any],
        abort: Callable[[str], None],
        targets: Targets,
        attempts: Attempts,
    ) -> None:
        super().__init__(asked)
        self._open_call = open_call
        self._abort = abort
        self._continuation = Continuation(self, asked, targets=targets, attempts=attempts)
        self._cancelled = threading.Event()
        self._call = self._open()

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._cancelled.is_set():
                try:
                    yield from self._read_call()
                except grpc.RpcError as error:
                    if not self._cancelled.is_set():
                        self._go_on_after(error)
                else:
                    return
        finally:
            self.cancel()

    def _open(self) -> Any:
        return self._open_call(self._continuation.step, self._continuation.remaining_seconds())

    def _read_call(self) -> Iterator[Delta]:
        for event in self._call:
            delta = self.take(event)
            if delta is not None:
                yield delta

    def _go_on_after(self, rpc_error: grpc.RpcError) -> None:
        """Waits and opens the next call. Raises: OutriderError when there is none."""
        error = from_rpc_error(rpc_error, target=self._continuation.step.target)
        try:
            step = self._continuation.next_after(error)
        except OutriderError as last:
            raise last from rpc_error
        if self._cancelled.wait(step.pause_seconds):
            return
        self._call = self._open()
        if self._cancelled.is_set():  # meanwhile: `cancel` has seen the call before
            self._call.cancel()

    def cancel(self) -> None:
        """Stops the request everywhere. Idempotent."""
        was_cancelled = self._cancelled.is_set()
        self._cancelled.set()
        self._call.cancel()
        if not was_cancelled and self._continuation.leaves_work:
            self._abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A client of one router, or of several with the same nodes. Thread-safe. Raises OutriderErrors, nothing of gRPC's.

    `target`: one "host:port", or several as a sequence or with commas between them. Of
    several, calls go to the one that answered last, and to the next one when it cannot be
    reached; and what `generate` streams has a resume window, so that it goes on without a
    router that is lost.

    `tls=None` is plaintext, `tls=TlsConfig()` TLS that trusts the system's authorities.
    `token` goes with every call as `authorization: Bearer …` and needs TLS. `retry` says
    which failed calls are made again; without it none is. `timeout_seconds` is for the
    calls that answer at once; a request's own is an option of `generate` and `complete`,
    and holds for all of its attempts together.

    Raises: ConfigError for a file of `tls` that cannot be read, and for a token without TLS;
    ValueError without a target.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: TlsConfig | None = None,
        token: str | None = None,
        retry: RetryPolicy = ONE_ATTEMPT,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._targets = Targets(target)
        self._timeout_seconds = timeout_seconds
        self._retry = retry
        self._closed = threading.Event()
        credentials, several = client_credentials(tls, token), len(self._targets) > 1
        self._channels = {
            target: open_sync_channel(target, credentials=credentials, is_replaceable=several)
            for target in self._targets.all
        }
        self._stubs = {target: router_pb2_grpc.RouterServiceStub(channel) for target, channel in self._channels.items()}
        self._streams: weakref.WeakSet[GenerateStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()

    @property
    def target(self) -> str:
        """The one that answered last, at first the first one."""
        return self._targets.current

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Streams an answer."""
        request = with_request_id(make_request(prompt, with_resume_window(options, self._targets)))
        return self._stream(Asked.answer_to(request), timeout_seconds=options.get("timeout_seconds"))

    def resume(
        self,
        request_id: str,
        next_positions: Mapping[int, int] | None = None,
        *,
        timeout_seconds: float | None = None,
        resume_window_seconds: float = DEFAULT_RESUME_WINDOW_SECONDS,
    ) -> GenerateStream:
        """Streams the rest of an answer that was begun with a resume window.

        `next_positions`: by sample, the position of the first token that is wanted; a sample
        that is left out starts at the end of the prompt. The stream that had the answer
        before, in whatever process, ends with AbortedError. `resume_window_seconds`: how long
        this one tries to go on where its connection breaks.
        """
        asked = Asked(
            request_id=request_id,
            request=None,
            resume_window_seconds=resume_window_seconds,
            next_positions=next_positions or {},
        )
        return self._stream(asked, timeout_seconds=timeout_seconds)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> CompleteResult:
        """The same answer at once, at the end."""
        request = with_request_id(make_request(prompt, options))
        return complete_from_proto(self._call("Complete", request, options.get("timeout_seconds")))

    def abort(self, request_id: str) -> bool:
        """Stops a request everywhere. False: unknown or already finished."""
        request = router_pb2.AbortRequest(request_id=request_id)
        lost: list[PeerLostError] = []
        for target in self._targets.in_order():  # without a common store each knows only its own
            try:
                if self._call("Abort", request, self._timeout_seconds, only=target).aborted:
                    return True
            except PeerLostError as error:
                lost.append(error)
        if len(lost) == len(self._targets):
            raise lost[0]
        return False

    def tokenize(self, prompt: str | Sequence[ChatMessage], *, add_generation_prompt: bool | None = None) -> list[int]:
        request = router_pb2.TokenizeRequest()
        set_prompt(request, prompt, add_generation_prompt=add_generation_prompt)
        return list(self._call("Tokenize", request, self._timeout_seconds).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        request = make_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request, self._timeout_seconds).text)

    def model(self) -> Model:
        return model_from_proto(self._call("GetModel", router_pb2.GetModelRequest(), self._timeout_seconds))

    def watch_cluster(self, *, interval_seconds: float = 1.0) -> Generator[ClusterStatus, None, None]:
        """The cluster now, then again at each interval, until the iterator is closed."""
        request = router_pb2.WatchClusterRequest(interval=to_duration(interval_seconds, field="interval"))
        target = self._targets.current
        call = self._stubs[target].WatchCluster(request)
        try:
            for response in call:
                yield cluster_from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=target) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Cancels what runs, and disconnects."""
        self._closed.set()
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, asked: Asked, *, timeout_seconds: float | None) -> GenerateStream:
        stream = GenerateStream(
            asked,
            open_call=lambda step, seconds: getattr(self._stubs[step.target], step.method)(
                step.request, timeout=seconds
            ),
            abort=self._abort_anywhere,
            targets=self._targets,
            attempts=Attempts(self._retry, timeout_seconds=timeout_seconds),
        )
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def _abort_anywhere(self, request_id: str) -> None:
        """Asks each router that can be reached; one that cannot loses the request with its resume window."""
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
