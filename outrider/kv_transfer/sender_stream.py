"""The sender's side of one transfer's stream: tracks unacknowledged frames, and waits with deadlines."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from outrider.errors import AbortedError, OutriderError, PeerLostError
from outrider.kv_transfer.base import CommitResult, CommitState, DrainState, FrameHeader, Region, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.frames import (
    ALIVE,
    CANCEL,
    METHOD,
    PROGRESS,
    WIRE_VERSION,
    Frame,
    MalformedMessageError,
    decode_message,
    encode_frame,
)
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.kv_transfer.shared_window import SharedWindow
from outrider.v1.kv_pb2 import KvAck, KvCommit, KvHello, KvReceiverMessage, KvSenderMessage, KvWelcome

MAX_UNACKNOWLEDGED_FRAMES = 256
"""Maximum number of frames in flight. So many acknowledgements always fit into the stream's flow-control window."""


class SenderStream:
    """One gRPC call. Belongs to one thread, but has its own reader thread, and any thread may call `interrupt`.

    Every wait ends with an error after `progress_seconds` without a message from the receiver.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        address: str,
        window: SharedWindow,
        config: KvTransferConfig,
        is_part: bool = False,
    ) -> None:
        """`window`: limits payload in messages; all streams to the address share it.

        `is_part`: whether another stream commits the transfer, see `Connector.connect`.
        """
        self.address = address
        self._tell_acknowledged: Callable[[int], None] = lambda _frame: None
        self.window = window
        self._is_part = is_part
        self.keep_alive_seconds = config.keep_alive_seconds
        self._connect_seconds = config.connect_seconds
        self._progress_seconds = config.progress_seconds
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._in_flight: dict[int, Callable[[], None]] = {}  # by frame number, the function that frees the frame's room
        self.num_frames = 0  # frames sent; also the number of the last frame
        self._last_heard = time.monotonic()
        self._broken: OutriderError | None = None  # set when the call has ended
        self._refused: OutriderError | None = None  # set by a refused frame or `interrupt`
        self._tell_end: Callable[[], None] = lambda: None  # called without the lock
        self._welcomes: list[KvWelcome] = []
        self._num_asked = 0  # number of requested regions that are not answered yet
        self._held: deque[Frame | None] = deque()  # answers to requests; None: the receiver does not hold the region
        self._answers: list[CommitResult] = []
        self._drain: DrainState | None = None
        push: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        self._call = push(iter(self._outgoing.get, None))  # None ends the requests
        threading.Thread(target=self._read, name="kv-sender-acks", daemon=True).start()

    # ---- the owner's thread

    def hello(self, spec: TransferSpec, **arena: Any) -> bytes | None:
        """Attaches to the transfer. Returns the nonce that the receiver has read from the offered arena.

        `arena`: fields of KvHello that describe the arena. Returns None if the receiver does not accept this connector.

        Raises: AbortedError if the receiver has no such transfer, or if another sender is attached to it; PeerLostError
        if the receiver does not answer or is another process.
        """
        self._welcomes.clear()
        hello = KvHello(
            version=WIRE_VERSION,
            transfer_id=spec.transfer_id,
            incarnation=spec.incarnation,
            is_part=self._is_part,
            **arena,
        )
        self._say(KvSenderMessage(hello=hello))
        self._wait(lambda: bool(self._welcomes), self._connect_seconds, "did not answer")
        welcome, there = self._welcomes[-1], f"KV receiver {self.address}"
        match welcome.state:
            case AttachState.ATTACHED:
                return welcome.nonce
            case AttachState.NOT_OFFERED:
                return None
            case AttachState.WRONG_INCARNATION:
                raise PeerLostError(f"{there} is not the process that granted the transfer", node=self.address)
            case AttachState.BUSY:
                raise AbortedError(f"{there} has another sender for this transfer")
        raise AbortedError(f"{there} does not expect this transfer")

    def _say(self, message: KvSenderMessage) -> None:
        self._outgoing.put(message.SerializeToString())

    def wait_for_room(self, amount: int, window: SharedWindow) -> None:
        """Waits until it has taken this amount of the window. Raises: PeerLostError, AbortedError.

        Until this stream has a frame in flight, messages to any stream that shares the window show that the receiver
        is alive; after that, only messages to this stream do. Keep-alives are sent meanwhile.
        """
        wake = self._wake

        def takes() -> bool:
            return len(self._in_flight) < MAX_UNACKNOWLEDGED_FRAMES and window.take(amount, wake)

        try:
            self._wait(takes, self._progress_seconds, "acknowledged nothing", window)
        finally:
            window.leave(wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def send(
        self, header: FrameHeader, payload: memoryview | None, *, offset: int = 0, release: Callable[[], None]
    ) -> None:
        """Queues one frame, with its payload or with the payload's place in the arena.

        `release` is called once, from any thread, when the receiver no longer needs the payload.
        """
        with self._changed:
            self.num_frames += 1
            sequence = self.num_frames
            self._in_flight[sequence] = release
        self._outgoing.put(encode_frame(sequence, header, payload, offset=offset))

    def ask(self, region: Region) -> None:
        """Requests KV that the receiver holds. `next_fetched` returns the answers in order."""
        with self._changed:
            self._num_asked += 1
        self._say(KvSenderMessage(read=region.pack()))

    def next_fetched(self) -> Frame:
        """Waits for the next answer to `ask`. Raises: AbortedError if the receiver lacks the KV, PeerLostError."""
        self._wait(lambda: bool(self._held), self._progress_seconds, "did not send requested KV")
        held = self._held.popleft()
        if held is None:
            raise AbortedError(f"KV receiver {self.address} does not hold the requested KV", reason="NOT_HELD")
        return held

    def keep_alive(self, *, has_progressed: bool = False) -> None:
        """Tells the receiver that this idle sender is alive. Raises: PeerLostError, AbortedError.

        `has_progressed`: whether work on the prompt goes on, which extends the receiver's timeout as a frame does.
        """
        self.raise_if_ended()
        self._outgoing.put(PROGRESS if has_progressed else ALIVE)

    def wait_until_acknowledged(self) -> None:
        """Waits until the receiver has all frames. Raises: PeerLostError, AbortedError."""
        self._wait(lambda: not self._in_flight, self._progress_seconds, "acknowledged nothing")
        self.raise_if_ended()

    def commit(self, digest: int) -> CommitResult:
        """Requests the commit. The request arrives after all frames, so its answer acknowledges them all.

        Raises: PeerLostError, AbortedError.
        """
        self._answers.clear()
        self._say(KvSenderMessage(commit=KvCommit(digest=digest)))
        self._wait(lambda: bool(self._answers), self._progress_seconds, "did not answer the commit")
        self.release_all()
        return self._answers[-1]

    def cancel(self) -> DrainState:
        """Cancels the transfer and ends the stream. Returns DRAINED if the receiver confirms this state in time."""
        self._outgoing.put(CANCEL)
        with self._changed:
            self._last_heard = time.monotonic()
            self._changed.wait_for(lambda: self._drain is not None or self._broken is not None, self._progress_seconds)
            drain = self._drain or DrainState.UNKNOWN
        if drain is DrainState.DRAINED:
            self.release_all()
        self.close()
        return drain

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        self._outgoing.put(None)
        with self._changed:
            is_settled = bool(self._answers) or self._drain is not None or (self._is_part and not self._in_flight)
        if not is_settled:
            self._call.cancel()

    def interrupt(self) -> None:
        """Makes a waiting call, and every later `put`, `keep_alive` or `commit`, raise AbortedError. Thread-safe."""
        with self._changed:
            self._refused = AbortedError(f"the KV transfer to {self.address} was cancelled")
            self._changed.notify_all()
        self._tell_if_ended()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Calls `tell` when the stream has ended, at once if it already has. After the end, `put` and `commit` raise.

        `tell` is called from any thread, perhaps more than once, and must not block.
        """
        self._tell_end = tell
        self._tell_if_ended()

    def when_acknowledged(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` with the number of each frame, from 1, when it is acknowledged.

        `tell` is called from a thread of the stream and must not block. Frames that only a commit's answer acknowledges
        are omitted. Call this before the first `put`.
        """
        self._tell_acknowledged = tell

    def _tell_if_ended(self) -> None:
        if self._refused is not None or self._broken is not None:
            self._tell_end()

    def raise_if_ended(self) -> None:
        """Raises PeerLostError or AbortedError if the stream has ended."""
        with self._changed:
            error = self._refused or self._broken
        if error is not None:
            raise error

    def release_all(self) -> None:
        """Releases the room of all frames in flight. Later acknowledgements have no effect."""
        with self._changed:
            in_flight, self._in_flight = list(self._in_flight.values()), {}
        for release in in_flight:
            release()

    def _wait(
        self, is_done: Callable[[], bool], seconds: float, complaint: str, turns: SharedWindow | None = None
    ) -> None:
        with self._changed:
            self._last_heard = told_at = time.monotonic()
            while not is_done():
                error = self._refused or self._broken
                if error is not None:
                    raise error
                heard = self._last_heard
                if turns is not None and not self._in_flight:
                    heard = max(heard, turns.last_heard)
                now = time.monotonic()
                remaining = heard + seconds - now
                if remaining <= 0:
                    raise PeerLostError(f"KV receiver {self.address} {complaint} for {seconds:g} s", node=self.address)
                if turns is not None:
                    if now >= told_at + self.keep_alive_seconds:
                        self._outgoing.put(ALIVE)
                        told_at = now
                    remaining = min(remaining, told_at + self.keep_alive_seconds - now)
                self._changed.wait(remaining)

    # ---- the reader thread

    def _read(self) -> None:
        try:
            for message in self._call:
                self._take(decode_message(message, KvReceiverMessage))
            error: OutriderError = PeerLostError(f"KV receiver {self.address} ended the stream", node=self.address)
        except (MalformedMessageError, ValueError) as malformed:  # ValueError: a number that the enum does not define
            self._call.cancel()
            error = PeerLostError(f"KV receiver {self.address}: {malformed}", node=self.address)
        except grpc.RpcError as broken:
            details = f"KV receiver {self.address}: {broken.code().name}: {broken.details()}"
            error = PeerLostError(details, node=self.address)
        with self._changed:
            self._broken = error
            self._changed.notify_all()
        self._tell_if_ended()
        self._outgoing.put(None)  # ends gRPC's thread, which waits for requests

    def _take(self, message: Frame | KvReceiverMessage) -> None:
        self.window.hear()
        if isinstance(message, KvReceiverMessage) and message.HasField("ack"):
            self._acknowledge(message.ack)
            return
        with self._changed:
            self._last_heard = time.monotonic()
            if isinstance(message, Frame) or message.HasField("not_held"):
                if not self._num_asked:  # unlimited answers could fill the memory
                    raise MalformedMessageError("received KV that was not requested")
                self._num_asked -= 1
                self._held.append(message if isinstance(message, Frame) else None)
            elif message.HasField("welcome"):
                self._welcomes = [message.welcome]
            elif message.HasField("commit_answer"):
                answer = message.commit_answer
                self._answers = [CommitResult(state=CommitState(answer.state), complete_until=answer.complete_until)]
            else:
                self._drain = DrainState.DRAINED if message.cancelled.is_drained else DrainState.UNKNOWN
            self._changed.notify_all()

    def _acknowledge(self, ack: KvAck) -> None:
        disposition = Disposition(ack.disposition)
        with self._changed:
            self._last_heard = time.monotonic()
            release = self._in_flight.pop(ack.sequence, None)
            if disposition.is_refusal and self._refused is None:
                self._refused = refusal_of(self.address, disposition)
            self._changed.notify_all()
        if release is not None:
            release()
            self._tell_acknowledged(ack.sequence)
        self._tell_if_ended()


def refusal_of(address: str, disposition: Disposition) -> AbortedError:
    """Makes the error that a sender raises after the receiver has refused a frame."""
    if disposition is Disposition.STALE:
        return AbortedError(f"KV receiver {address} has ended the transfer", reason="TRANSFER_UNKNOWN")
    return AbortedError(f"KV receiver {address} refused a frame: {disposition.name}", reason="FRAME_REFUSED")
