"""Connector `grpc`: payload in the stream's messages. Works everywhere."""

from __future__ import annotations

import functools

from outrider.kv_transfer.base import FrameHeader, Payload, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.sender import Carrier
from outrider.kv_transfer.sender_stream import SenderStream


class InlineCarrier:
    """Each frame is one message; the window of all streams to a receiver bounds what is unacknowledged.

    Without a state, so that it is the `CarrierSource` of all receivers, too.
    """

    name = "grpc"

    def __init__(self, config: KvTransferConfig) -> None:
        self.max_frame_bytes = config.frame_bytes

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Carrier | None:
        return None if stream.hello(spec) is None else self

    def send(self, stream: SenderStream, header: FrameHeader, payload: Payload) -> None:
        assert isinstance(payload, memoryview)
        stream.wait_for_room(len(payload), stream.window)
        stream.send(header, payload, release=functools.partial(stream.window.give_back, len(payload)))

    def abandon(self, stream: SenderStream) -> None:
        """Messages are copies: there is nothing that a receiver could still read."""
        stream.release_all()

    def close(self) -> None:
        """Owns nothing."""
