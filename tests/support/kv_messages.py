"""The messages of a sender of KV and its receiver, encoded and decoded one at a time."""

from __future__ import annotations

from types import SimpleNamespace

from outrider.kv_transfer.base import CommitResult, CommitState, frames_digest
from outrider.kv_transfer.frames import WIRE_VERSION, Frame, decode_message, encode_frame
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.v1.kv_pb2 import KvCommit, KvHello, KvReceiverMessage, KvSenderMessage, KvWelcome


def encode_hello(transfer_id, incarnation, **others):
    """Returns a hello. `others` are further fields: an arena that is offered, another version."""
    fields = {"version": WIRE_VERSION, "transfer_id": transfer_id, "incarnation": incarnation, **others}
    return KvSenderMessage(hello=KvHello(**fields)).SerializeToString()


def encode_slot_frame(sequence, header, offset):
    return encode_frame(sequence, header, None, offset=offset)


def encode_commit(frames):
    """Returns a commit. `frames` are checksums by region."""
    return KvSenderMessage(commit=KvCommit(digest=frames_digest(frames))).SerializeToString()


def encode_read(region):
    return KvSenderMessage(read=region.pack()).SerializeToString()


def encode_welcome(state):
    return KvReceiverMessage(welcome=KvWelcome(state=state)).SerializeToString()


def decode_sender_message(message):
    """Returns a frame, or the kind and the content of another message."""
    return _unwrap(decode_message(message, KvSenderMessage))


def decode_receiver_message(message):
    """Returns a receiver's message. Welcomes, acknowledgements and answers to commits have this project's enums."""
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
