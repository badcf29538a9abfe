"""What a sender of KV and its receiver say to each other, one message at a time."""

from __future__ import annotations

from types import SimpleNamespace

from outrider.kv_transfer.base import CommitResult, CommitState, frames_digest
from outrider.kv_transfer.frames import WIRE_VERSION, Frame, decode_message, encode_frame
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.v1.kv_pb2 import KvCommit, KvHello, KvReceiverMessage, KvSenderMessage, KvWelcome


def encode_hello(transfer_id, incarnation, **others):
    """`others`: an arena on offer, another version."""
    fields = {"version": WIRE_VERSION, "transfer_id": transfer_id, "incarnation": incarnation, **others}
    return KvSenderMessage(hello=KvHello(**fields)).SerializeToString()


def encode_slot_frame(sequence, header, offset):
    return encode_frame(sequence, header, None, offset=offset)


def encode_commit(frames):
    """`frames`: checksums by region."""
    return KvSenderMessage(commit=KvCommit(digest=frames_digest(frames))).SerializeToString()


def encode_read(region):
    return KvSenderMessage(read=region.pack()).SerializeToString()


def encode_welcome(state):
    return KvReceiverMessage(welcome=KvWelcome(state=state)).SerializeToString()


def decode_sender_message(message):
    """A frame, or what else it is: its kind, and what it says."""
    return _unwrap(decode_message(message, KvSenderMessage))


def decode_receiver_message(message):
    """The same, but a welcome, an acknowledgement or a commit's answer in this project's enums."""
    found = _unwrap(decode_message(message, KvReceiverMessage))
    match found:
        case ("welcome", welcome):
            return SimpleNamespace(state=AttachState(welcome.state), nonce=welcome.nonce)
        case ("ack", ack):
            return SimpleNamespace(sequence=ack.sequence, disposition=Disposition(ack.disposition))
        case ("commit_answer", answer):
            return CommitResult(state=CommitState(answer.state), complete_until=answer.complete_until)
    return found


def _unwrap(message):
    if isinstance(message, Frame):
        return message
    kind = message.WhichOneof("message")
    return kind, getattr(message, kind)
