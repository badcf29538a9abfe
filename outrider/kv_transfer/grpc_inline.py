"""Connector `grpc`: payload in the stream's messages. Works everywhere."""

from __future__ import annotations

from outrider.kv_transfer.base import FrameHeader, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.frames import Hello, encode_frame
from outrider.kv_transfer.inbox import AttachState
from outrider.kv_transfer.sender import Carrier, raise_unless_attached
from outrider.kv_transfer.sender_stream import SenderStream


class InlineCarrier:
    """Each frame is one message; the window of all streams to a receiver bounds what is unacknowledged.

    Without a state, so that it is the `CarrierSource` of all receivers, too.
    """

    name = "grpc"

    def __init__(self, config: KvTransferConfig) -> None:
        self.max_frame_bytes = config.frame_bytes

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Carrier | None:
        welcome = stream.hello(Hello(transfer_id=spec.transfer_id, incarnation=spec.incarnation))
        if welcome.state is AttachState.NOT_OFFERED:
            return None
        raise_unless_attached(welcome, stream.address)
        return self

    def send(self, stream: SenderStream, header: FrameHeader, payload: memoryview) -> None:
        stream.wait_for_room(len(payload))
        stream.send(header, lambda sequence, head: encode_frame(sequence, head, payload))

    def abandon(self) -> None:
        """Messages are copies: there is nothing that a receiver could still read."""

    def close(self) -> None:
        """Owns nothing."""
