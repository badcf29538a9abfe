"""The sender's end of one transfer's stream: what is unacknowledged, and waiting with deadlines."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import grpc

from outrider.errors import AbortedError, OutriderError, PeerLostError
from outrider.kv_transfer.base import CommitResult, DrainState, FrameHeader, Region
from outrider.kv_transfer.coverage import Manifest
from outrider.kv_transfer.frames import (
    ALIVE,
    CANCEL,
    METHOD,
    Ack,
    Frame,
    Hello,
    Kind,
    MalformedMessageError,
    ReceiverMessage,
    Welcome,
    decode_receiver_message,
    encode_commit,
    encode_hello,
    encode_read,
)
from outrider.kv_transfer.inbox import Disposition
from outrider.kv_transfer.shared_window import SharedWindow

MAX_UNACKNOWLEDGED_FRAMES = 256
"""So that acknowledgements always fit into the stream's own window."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    num_bytes: int
    release: Callable[[], None]  # the payload's memory


class SenderStream:
    """One gRPC call. One owner; its reader thread and `interrupt` are the only others.

    Every wait ends by `progress_seconds` without a word from the receiver.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        address: str,
        window: SharedWindow,
        connect_seconds: float,
        progress_seconds: float,
    ) -> None:
        """`window`: of all streams to the address."""
        self.address = address
        self._tell_acknowledged: Callable[[int], None] = lambda _frame: None
        self._window = window
        self._num_taken = 0  # bytes of it
        self._connect_seconds = connect_seconds
        self._progress_seconds = progress_seconds
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._in_flight: dict[int, _InFlight] = {}
        self.num_frames = 0  # that were sent: the number of the last one
        self._last_heard = time.monotonic()
        self._broken: OutriderError | None = None  # the call is over
        self._refused: OutriderError | None = None  # the receiver, or `interrupt`, wants no more
        self._tell_end: Callable[[], None] | None = None  # called once, without the lock
        self._welcomes: list[Welcome] = []
        self._num_asked = 0  # regions whose answer is due
        self._held: deque[Frame | Literal[Kind.NOT_HELD]] = deque()
        self._answers: list[CommitResult] = []
        self._drain: DrainState | None = None
        push: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        self._call = push(iter(self._outgoing.get, None))  # None ends it
        threading.Thread(target=self._read, name="kv-sender-acks", daemon=True).start()

    # ---- what the owner does

    def hello(self, hello: Hello) -> Welcome:
        """Raises: PeerLostError."""
        self._welcomes.clear()
        self._outgoing.put(encode_hello(hello))
        self._wait(lambda: bool(self._welcomes), self._connect_seconds, "did not answer")
        return self._welcomes[-1]

    def wait_for_room(self, num_bytes: int) -> None:
        """Until this much more may be unacknowledged. Raises: PeerLostError, AbortedError.

        While others have their turn, the receiver lives if any of them hears of it; once this stream has sent, it must
        hear by itself.
        """
        wake = self._wake

        def takes() -> bool:
            return len(self._in_flight) < MAX_UNACKNOWLEDGED_FRAMES and self._window.take(num_bytes, wake)

        try:
            self._wait(takes, self._progress_seconds, "acknowledges nothing", is_in_turns=True)
            with self._changed:
                self._num_taken += num_bytes
        finally:
            self._window.leave(wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def send(
        self,
        header: FrameHeader,
        encode: Callable[[int, FrameHeader], bytes],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Queues one frame. `release` is called once, by whichever thread learns that its payload is not needed."""
        with self._changed:
            self.num_frames += 1
            sequence = self.num_frames
            self._in_flight[sequence] = _InFlight(header.length, release)
        self._outgoing.put(encode(sequence, header))

    def ask(self, region: Region) -> None:
        """For KV that the receiver holds: `next_held` gives the answers in order."""
        with self._changed:
            self._num_asked += 1
        self._outgoing.put(encode_read(region))

    def next_held(self) -> Frame:
        """Raises: AbortedError when it is not held there, PeerLostError."""
        self._wait(lambda: bool(self._held), self._progress_seconds, "sends nothing of what it holds")
        held = self._held.popleft()
        if held is Kind.NOT_HELD:
            raise AbortedError(f"KV receiver {self.address} does not hold what was asked for", reason="NOT_HELD")
        return held

    def keep_alive(self) -> None:
        """Tells the receiver that the sender lives while it sends nothing. Raises: PeerLostError, AbortedError."""
        self.raise_if_ended()
        self._outgoing.put(ALIVE)

    def commit(self, manifest: Manifest) -> CommitResult:
        """Frames and commit arrive in order: the answer acknowledges every frame.

        Raises: PeerLostError, AbortedError.
        """
        self._answers.clear()
        self._outgoing.put(encode_commit(manifest))
        self._wait(lambda: bool(self._answers), self._progress_seconds, "does not answer the commit")
        self._release_all()
        return self._answers[-1]

    def cancel(self) -> DrainState:
        """DRAINED when the receiver says so in time. Ends the stream."""
        self._outgoing.put(CANCEL)
        with self._changed:
            self._last_heard = time.monotonic()
            self._changed.wait_for(lambda: self._drain is not None or self._broken is not None, self._progress_seconds)
            drain = self._drain or DrainState.UNKNOWN
        if drain is DrainState.DRAINED:
            self._release_all()
        self.close()
        return drain

    def close(self) -> None:
        """Ends the stream; idempotent."""
        self._outgoing.put(None)
        with self._changed:
            is_settled = bool(self._answers) or self._drain is not None
        if not is_settled:
            self._call.cancel()
        self._give_back()

    def interrupt(self) -> None:
        """From any thread: what waits raises AbortedError, and so does every later `put`, `keep_alive` or `commit`."""
        with self._changed:
            self._refused = AbortedError(f"the KV transfer to {self.address} was cancelled")
            self._changed.notify_all()
        self._tell_if_ended()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once, from any thread, when every `put` and `commit` from then on raises: at once if so already.

        Not after a commit that succeeded. It must not block.
        """
        with self._changed:
            self._tell_end = tell
        self._tell_if_ended()

    def when_acknowledged(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` with the number of each frame, from 1, as it is acknowledged, from a thread of the stream.

        Set before the first `put`. It must not block. Frames that only a commit's answer acknowledges are not told.
        """
        self._tell_acknowledged = tell

    def _tell_if_ended(self) -> None:
        with self._changed:
            if self._refused is None and self._broken is None:
                return
            tell, self._tell_end = self._tell_end, None
        if tell is not None:
            tell()

    def raise_if_ended(self) -> None:
        """Raises: PeerLostError, AbortedError."""
        with self._changed:
            error = self._refused or self._broken
        if error is not None:
            raise error

    def _wait(self, is_done: Callable[[], bool], seconds: float, complaint: str, *, is_in_turns: bool = False) -> None:
        with self._changed:
            self._last_heard = time.monotonic()
            while not is_done():
                error = self._refused or self._broken
                if error is not None:
                    raise error
                is_others_turn = is_in_turns and not self._in_flight
                heard = max(self._last_heard, self._window.last_heard) if is_others_turn else self._last_heard
                remaining = heard + seconds - time.monotonic()
                if remaining <= 0:
                    raise PeerLostError(f"KV receiver {self.address} {complaint} for {seconds:g} s", node=self.address)
                self._changed.wait(remaining)

    def _release_all(self) -> None:
        with self._changed:
            in_flight, self._in_flight = list(self._in_flight.values()), {}
        for item in in_flight:
            item.release()
        self._give_back()

    def _give_back(self) -> None:
        """All that it has of the window: it is acknowledged, or never will be."""
        with self._changed:
            num_bytes, self._num_taken = self._num_taken, 0
        self._window.give_back(num_bytes)

    # ---- the reader thread

    def _read(self) -> None:
        try:
            for message in self._call:
                self._take(decode_receiver_message(message))
            error: OutriderError = PeerLostError(f"KV receiver {self.address} ended the stream", node=self.address)
        except MalformedMessageError as malformed:
            self._call.cancel()
            error = PeerLostError(f"KV receiver {self.address}: {malformed.message}", node=self.address)
        except grpc.RpcError as broken:
            details = f"KV receiver {self.address}: {broken.code().name}: {broken.details()}"
            error = PeerLostError(details, node=self.address)
        with self._changed:
            self._broken = error
            self._changed.notify_all()
        self._tell_if_ended()
        self._outgoing.put(None)  # lets gRPC's own thread go

    def _take(self, message: ReceiverMessage) -> None:
        acknowledged: _InFlight | None = None
        frame = num_bytes = 0
        self._window.hear()
        with self._changed:
            self._last_heard = time.monotonic()
            match message:
                case Ack():
                    frame = message.sequence
                    acknowledged = self._in_flight.pop(frame, None)
                    if acknowledged is not None:
                        num_bytes = min(acknowledged.num_bytes, self._num_taken)  # none of a shared memory's
                        self._num_taken -= num_bytes
                    if message.disposition.is_refusal and self._refused is None:
                        self._refused = refusal_of(self.address, message.disposition)
                case Welcome():
                    self._welcomes = [message]
                case Frame() | Kind.NOT_HELD:
                    if not self._num_asked:  # each may be as large as a frame
                        raise MalformedMessageError("KV came that was not asked for")
                    self._num_asked -= 1
                    self._held.append(message)
                case CommitResult():
                    self._answers = [message]
                case DrainState():
                    self._drain = message
            self._changed.notify_all()
        if acknowledged is not None:
            self._window.give_back(num_bytes)
            acknowledged.release()
            self._tell_acknowledged(frame)
        self._tell_if_ended()


def refusal_of(address: str, disposition: Disposition) -> AbortedError:
    """What a sender raises once the receiver has refused a frame."""
    if disposition is Disposition.STALE:
        return AbortedError(f"KV receiver {address} has given the transfer up", reason="TRANSFER_UNKNOWN")
    return AbortedError(f"KV receiver {address} refused a frame: {disposition.name}", reason="FRAME_REFUSED")
