"""One sender's stream, as the receiver serves it: message in, answer out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from outrider.kv_transfer.arena import ArenaMapping, ArenaReader
from outrider.kv_transfer.base import Region
from outrider.kv_transfer.frames import (
    NO_ARENA,
    NOT_HELD,
    Ack,
    Frame,
    Hello,
    Kind,
    MalformedMessageError,
    SenderMessage,
    SlotFrame,
    Welcome,
    decode_sender_message,
    encode_ack,
    encode_cancelled,
    encode_commit_answer,
    encode_frame,
    encode_welcome,
)
from outrider.kv_transfer.inbox import AttachState, Disposition, TransferInbox

DRAIN_SECONDS = 10.0
MAX_FALSE_HELLOS = 8
"""Of one stream. A sender tries one or two connectors for a transfer that is expected."""


class ReceiverStream:
    """State of one stream. `handle` runs in the stream's thread; the rest may be called from any."""

    def __init__(
        self, *, inbox: TransferInbox, arenas: ArenaReader, connectors: frozenset[str], cancel: Callable[[], object]
    ) -> None:
        self._inbox = inbox
        self._arenas = arenas
        self._connectors = connectors
        self.cancel = cancel
        self._arena: ArenaMapping | None = None
        self._lock = threading.Lock()
        self._end_reason: str | None = None
        self._num_false_hellos = 0
        self.transfer_id: bytes | None = None  # once attached

    @property
    def is_attached(self) -> bool:
        return self.transfer_id is not None

    def handle(self, message: bytes) -> bytes | None:
        """The answer, if there is one. A message that does not parse is counted; the first must be a Hello."""
        parsed: SenderMessage | None
        try:
            parsed = decode_sender_message(message)
        except MalformedMessageError:
            parsed = None  # if it was a frame, the commit will miss it
        if isinstance(parsed, Hello):
            return encode_welcome(self._welcome(parsed))
        if parsed is None or self.transfer_id is None:
            self._inbox.count("messages_malformed")
            if self.transfer_id is None:
                self.cancel()  # not one of ours
            return None
        return self._answer(parsed, self.transfer_id)

    def _answer(self, message: SenderMessage, transfer_id: bytes) -> bytes | None:
        match message:
            case Region():
                held = self._inbox.read(transfer_id, message)
                return NOT_HELD if held is None else encode_frame(0, *held, kind=Kind.HELD)
            case Frame() | SlotFrame():
                return encode_ack(Ack(sequence=message.sequence, disposition=self._accept(message)))
            case Mapping():
                return encode_commit_answer(self._inbox.commit(transfer_id, message))
            case Kind.CANCEL:
                self._inbox.fail(transfer_id, "cancelled by the sender")
                return encode_cancelled(self._inbox.wait_until_drained(transfer_id, timeout_seconds=DRAIN_SECONDS))
            case _:
                return None

    def _welcome(self, hello: Hello) -> Welcome:
        wants_arena = hello.arena_id != NO_ARENA
        connector = "shared_memory" if wants_arena else "grpc"
        if connector not in self._connectors:
            return Welcome(state=AttachState.NOT_OFFERED)
        if self.transfer_id is None:
            state = self._inbox.attach(hello.transfer_id, hello.incarnation, connector=connector)
            if state is not AttachState.ATTACHED:
                self._num_false_hellos += 1  # each is work for the interpreter that the node's steps need as well
                if self._num_false_hellos == MAX_FALSE_HELLOS:
                    self.cancel()
                return Welcome(state=state)
            with self._lock:
                self.transfer_id = hello.transfer_id
                end_reason = self._end_reason
            if end_reason is not None:  # the stream broke just now
                self._inbox.fail(hello.transfer_id, end_reason)
        elif hello.transfer_id != self.transfer_id:
            return Welcome(state=AttachState.BUSY)  # one stream, one transfer
        else:
            self._inbox.set_connector(self.transfer_id, connector)
        self._release_arena()
        arena = self._arenas.attach(hello.arena_id, hello.arena_bytes) if wants_arena else None
        self._arena = arena
        return Welcome(state=AttachState.ATTACHED, nonce=NO_ARENA if arena is None else arena.nonce)

    def _accept(self, frame: Frame | SlotFrame) -> Disposition:
        if frame.header.transfer_id != self.transfer_id:
            return self._inbox.note(Disposition.STALE)
        if isinstance(frame, Frame):
            return self._inbox.accept(frame.header, frame.payload)
        arena = self._arena  # `break_off` comes from another thread
        payload = None if arena is None else arena.copy(frame.offset, frame.header.length)
        if payload is None:
            return self._inbox.note(Disposition.OUT_OF_BOUNDS)
        return self._inbox.accept(frame.header, payload)

    def break_off(self) -> None:
        """The stream has ended. Idempotent; fails the transfer unless it was committed."""
        self._end("the stream broke before the commit")
        self._release_arena()

    def expire(self) -> None:
        """The sender has made no progress for too long."""
        self._end("the sender made no progress")
        self.cancel()

    def end_unless_committed(self) -> None:
        """The owner has closed the transfer: the sender should hear of it now."""
        if self.transfer_id is not None and not self._inbox.was_committed(self.transfer_id):
            self.cancel()  # otherwise the commit's answer may still be on its way

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            transfer_id = self.transfer_id
        if transfer_id is not None:
            self._inbox.fail(transfer_id, reason)

    def _release_arena(self) -> None:
        with self._lock:
            arena, self._arena = self._arena, None
        if arena is not None:
            self._arenas.release(arena)
