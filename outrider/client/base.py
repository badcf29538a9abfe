"""Code that both clients share: channels, and the opening of streams. Nothing here waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

import grpc

from outrider.client.continuation import Continuation, Step
from outrider.client.options import (
    DEFAULT_RESUME_WINDOW_SECONDS,
    GenerateOptions,
    Prompt,
    make_request,
    with_request_id,
)
from outrider.client.record import StreamRecord, StreamRequest
from outrider.client.retry import ONE_ATTEMPT, Attempts, RetryPolicy
from outrider.client.targets import DEFAULT_TARGET, Targets
from outrider.errors import OutriderError
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import TlsConfig, client_credentials
from outrider.v1 import router_pb2, router_pb2_grpc

DEFAULT_TIMEOUT_SECONDS = 30.0
"""Default timeout in seconds of calls that answer at once. Generation has no timeout by default."""
ADAPTER_TIMEOUT_SECONDS = 90.0
"""Default timeout in seconds of loading an adapter. A router waits up to 60 s for a node to load it."""
ABORT_SECONDS = 1.0
"""Seconds that the end of a stream may wait for a router to confirm that it has stopped the request."""


class BaseStream(StreamRecord):
    """One streamed answer, over as many calls as needed."""

    _make_event: Callable[[], Any]

    def __init__(
        self,
        wanted: StreamRequest,
        *,
        open_call: Callable[[Step, float | None], Any],
        abort: Callable[[str], Any],
        targets: Targets,
        attempts: Attempts,
    ) -> None:
        super().__init__(wanted)
        self._cancelled = self._make_event()
        self._open_call = open_call
        self._attempts = attempts
        self._abort = abort
        self._continuation = Continuation(self, wanted, targets=targets, attempts=attempts)
        self._call = self._open()

    def _open(self) -> Any:
        return self._open_call(self._continuation.step, self._attempts.remaining_seconds())

    def _next_step(self, rpc_error: grpc.RpcError) -> Step:
        """Returns the call that follows a failed one. Raises: OutriderError if the stream cannot continue."""
        try:
            return self._continuation.next_after(from_rpc_error(rpc_error, target=self._continuation.step.target))
        except OutriderError as last:
            raise last from rpc_error


StreamT = TypeVar("StreamT", bound=BaseStream)


class BaseClient(Generic[StreamT]):
    """The base of both clients: a channel to every target, and the open streams."""

    _make_stream: type[StreamT]
    _open_channel: Callable[..., Any]  # subclasses set it as a staticmethod

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: TlsConfig | None = None,
        token: str | None = None,
        retry: RetryPolicy = ONE_ATTEMPT,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        Attempts(retry, timeout_seconds=timeout_seconds)  # validates the arguments
        self._targets = Targets(target)
        self._timeout_seconds = timeout_seconds
        self._retry = retry
        credentials, several = client_credentials(tls, token), len(self._targets) > 1
        self._channels = {
            target: self._open_channel(target, credentials=credentials, is_replaceable=several)
            for target in self._targets.all
        }
        self._stubs = {target: router_pb2_grpc.RouterServiceStub(channel) for target, channel in self._channels.items()}
        self._streams: weakref.WeakSet[StreamT] = weakref.WeakSet()
        self._streams_lock = threading.Lock()
        self._closed = threading.Event()

    def _abort_anywhere(self, request_id: str) -> Any:
        raise NotImplementedError

    @property
    def target(self) -> str:
        """The target that answered last, or the first one if none has answered yet."""
        return self._targets.current

    # ------------------------------------------------------------ streams

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> StreamT:
        """Streams an answer. It is resumable by default if there are several routers."""
        if len(self._targets) > 1:
            options.setdefault("resume_window_seconds", DEFAULT_RESUME_WINDOW_SECONDS)
        request = make_request(prompt, options)
        return self.generate_message(request, timeout_seconds=options.get("timeout_seconds"))

    def generate_message(self, request: router_pb2.GenerateRequest, *, timeout_seconds: float | None = None) -> StreamT:
        """Streams the answer to an existing message."""
        return self._stream(StreamRequest.answer_to(with_request_id(request)), timeout_seconds=timeout_seconds)

    def resume(
        self,
        request_id: str,
        next_positions: Mapping[int, int] | None = None,
        *,
        timeout_seconds: float | None = None,
        resume_window_seconds: float = DEFAULT_RESUME_WINDOW_SECONDS,
    ) -> StreamT:
        """Streams the rest of an answer that was started with a resume window.

        `next_positions` maps a sample to the position of the first token wanted; a sample that is
        left out starts at the end of the prompt. The previous stream of this answer, in whichever
        process, ends with AbortedError. `resume_window_seconds` limits how long this stream tries
        to continue after its connection breaks.
        """
        wanted = StreamRequest(
            request_id=request_id,
            request=None,
            resume_window_seconds=resume_window_seconds,
            next_positions=next_positions or {},
        )
        return self._stream(wanted, timeout_seconds=timeout_seconds)

    def _stream(self, wanted: StreamRequest, *, timeout_seconds: float | None) -> StreamT:
        stream = self._make_stream(
            wanted,
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
