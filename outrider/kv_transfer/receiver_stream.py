"""The receiver's side of one sender's stream: takes messages and returns answers."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from outrider.kv_transfer.arena import ArenaMapping, ArenaReader
from outrider.kv_transfer.base import DrainState, Payload
from outrider.kv_transfer.config import CUDA_IPC
from outrider.kv_transfer.frames import (
    NOT_HELD,
    WIRE_VERSION,
    Frame,
    MalformedMessageError,
    decode_message,
    decode_region,
    encode_frame,
)
from outrider.kv_transfer.inbox import AttachState, Disposition, TransferInbox
from outrider.v1.kv_pb2 import (
    KvAck,
    KvCancelled,
    KvCommitAnswer,
    KvHello,
    KvReceiverMessage,
    KvSenderMessage,
    KvWelcome,
)

DRAIN_SECONDS = 10.0
"""Seconds to wait for the writes in flight of a cancelled transfer before answering the sender."""
MAX_FALSE_HELLOS = 8
"""Number of failed hellos after which a stream ends. An honest sender needs at most one per connector, i.e. three."""


class ReceiverStream:
    """The state of one stream. `handle` runs in the stream's thread; other methods may be called from any thread."""

    def __init__(
        self,
        *,
        inbox: TransferInbox,
        readers: Mapping[str, ArenaReader | None],
        cancel: Callable[[], object],
        deadline: float = math.inf,
    ) -> None:
        """`readers`: the arena reader of each accepted connector, by name; None for a connector without arenas.

        `deadline`: the time.monotonic by which the sender's next message must have arrived.
        """
        self.deadline = deadline
        self._inbox = inbox
        self._readers = readers
        self.cancel = cancel
        self._connector = ""  # from the sender's last successful hello
        self._arena: ArenaMapping | None = None
        self._lock = threading.Lock()
        self._end_reason: str | None = None
        self._num_false_hellos = 0
        self._is_part = False
        self.transfer_id: bytes | None = None  # None until the stream is attached

    @property
    def is_attached(self) -> bool:
        return self.transfer_id is not None

    def handle(self, message: bytes) -> bytes | None:
        """Handles a message (first a hello) and returns the answer, if any. Counts malformed messages."""
        try:
            answer = self._answer(decode_message(message, KvSenderMessage))
        except MalformedMessageError:  # if it was a frame, the commit will be incomplete
            self._inbox.count("messages_malformed")
            if not self.is_attached:
                self.cancel()  # the peer is not one of our senders
            return None
        return answer.SerializeToString() if isinstance(answer, KvReceiverMessage) else answer

    def _answer(self, message: Frame | KvSenderMessage) -> KvReceiverMessage | bytes | None:
        if isinstance(message, KvSenderMessage) and message.HasField("hello"):
            return KvReceiverMessage(welcome=self._welcome(message.hello))
        if self.transfer_id is None:
            raise MalformedMessageError("the first message is not a hello")
        if isinstance(message, Frame):
            ack = KvAck(sequence=message.sequence, disposition=_on_wire(self._accept(message)))
            return KvReceiverMessage(ack=ack)
        match message.WhichOneof("message"):
            case "read" | "commit" if self._is_part:
                raise MalformedMessageError("a part reads nothing and commits nothing")
            case "read":
                held = self._inbox.read(self.transfer_id, decode_region(message.read))
                return NOT_HELD if held is None else encode_frame(0, *held)
            case "commit":
                result = self._inbox.commit(self.transfer_id, message.commit.digest, connector=self._connector)
                answer = KvCommitAnswer(state=_on_wire(result.state), complete_until=result.complete_until)
                return KvReceiverMessage(commit_answer=answer)
            case "alive" if message.alive.has_progressed:
                self._inbox.note_progress(self.transfer_id)
            case "cancel":
                self._inbox.fail(self.transfer_id, "cancelled by the sender")
                drain = self._inbox.wait_until_drained(self.transfer_id, timeout_seconds=DRAIN_SECONDS)
                return KvReceiverMessage(cancelled=KvCancelled(is_drained=drain is DrainState.DRAINED))
        return None

    def _welcome(self, hello: KvHello) -> KvWelcome:
        if hello.version != WIRE_VERSION:
            raise MalformedMessageError(f"KV wire version {hello.version} is not supported: expected {WIRE_VERSION}")
        connector = "grpc"
        if hello.arena_id:
            connector = CUDA_IPC if hello.arena_is_on_device else "shared_memory"
        if connector not in self._readers:
            return KvWelcome(state=_on_wire(AttachState.NOT_OFFERED))
        if self.transfer_id is None:
            state = self._inbox.attach(hello.transfer_id, hello.incarnation, is_part=hello.is_part)
            if state is not AttachState.ATTACHED:
                self._num_false_hellos += 1  # each costs interpreter time, which the node's steps need too
                if self._num_false_hellos == MAX_FALSE_HELLOS:
                    self.cancel()
                return KvWelcome(state=_on_wire(state))
            with self._lock:
                self.transfer_id, self._is_part = hello.transfer_id, hello.is_part
                end_reason = self._end_reason
            if end_reason is not None and not self._is_part:  # the stream ended while it was being attached
                self._inbox.fail(hello.transfer_id, end_reason)
        elif hello.transfer_id != self.transfer_id:
            return KvWelcome(state=_on_wire(AttachState.BUSY))  # a stream serves one transfer only
        self._release_arena()
        self._connector = connector
        reader = self._readers[connector]
        arena = None if reader is None else reader.attach(hello.arena_id, hello.arena_bytes)
        self._arena = arena
        return KvWelcome(state=_on_wire(AttachState.ATTACHED), nonce=arena.nonce if arena is not None else b"")

    def _accept(self, frame: Frame) -> Disposition:
        if frame.header.transfer_id != self.transfer_id:
            return self._inbox.note(Disposition.STALE)
        payload: Payload | None = frame.payload
        if frame.offset:
            arena = self._arena  # read once: `break_off` in another thread may reset it
            payload = None if arena is None else arena.copy(frame.offset, frame.header.length)
        if payload is None:
            return self._inbox.note(Disposition.OUT_OF_BOUNDS)
        return self._inbox.accept(frame.header, payload)

    def break_off(self) -> None:
        """Handles the end of the stream: fails the transfer unless it was committed or this is a part. Idempotent."""
        self._end("the stream ended before the commit")
        self._release_arena()

    def expire(self) -> None:
        """Ends the stream of a sender that has made no progress for too long, as `break_off` does. Idempotent."""
        self._end("the sender made no progress")
        self.cancel()

    def end_unless_committed(self) -> None:
        """Ends the stream of a transfer that the owner has closed, so that the sender notices at once."""
        if self.transfer_id is not None and not self._inbox.was_committed(self.transfer_id):
            self.cancel()  # not after a commit, whose answer may still be in flight

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            transfer_id = self.transfer_id
        if transfer_id is not None and not self._is_part:  # whoever commits notices that frames are missing
            self._inbox.fail(transfer_id, reason)

    def _release_arena(self) -> None:
        with self._lock:
            arena, self._arena = self._arena, None
            reader = self._readers.get(self._connector)
        if arena is not None and reader is not None:
            reader.release(arena)


def _on_wire(member: enum.IntEnum) -> Any:
    """Converts an enum member to the number of kv.proto's enum, which is the same."""
    return member.value
