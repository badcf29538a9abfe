"""A push from a node with several ranks: each rank sends the KV that it holds on a stream of its own.

Rank 0 cuts the frames and commits the transfer. It tells another rank which frames to send and where their KV is, over
the channel of a task (see `RankGroup.start`), and at the end gets the checksums of what the rank has sent.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from outrider.engine.kv_cache.base import Bytes
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.commands import KvRequest
from outrider.engine.ranks.group import RankGroup
from outrider.errors import InternalError, OutriderError, describe_error
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.sender import Sender
from outrider.prefill import TimedPart
from outrider.rpc.tls import PeerSecurity, SecurityConfig
from prefill_node.pushed_parts import PushedParts


@dataclass(frozen=True, slots=True)
class RankFrame:
    """A frame that a rank is to send."""

    region: Region
    request: KvRequest  # reads the payload in the rank


@dataclass(frozen=True, slots=True)
class End:
    """The last message to a rank, which then answers with `RankPushed` or an OutriderError."""

    is_complete: bool  # otherwise the push has failed, and the rank stops at once


@dataclass(frozen=True, slots=True)
class RankPushed:
    """What a rank has sent; the receiver has acknowledged all of it."""

    checksums: dict[Region, int]  # of the frames, by region
    num_bytes: int
    parts: tuple[TimedPart, ...]  # on the monotonic clock, which all processes of a machine share


@dataclass(frozen=True, slots=True)
class Preparation:
    """A task that only makes a rank import this module, which takes a second, before the first push."""

    def run(self, read: Callable[[KvRequest], Bytes], channel: Channel) -> None:
        """Implements RankTask.run."""


@dataclass(frozen=True, slots=True)
class RankPush:
    """The task of a rank in one transfer."""

    config: KvTransferConfig
    security: SecurityConfig
    address: str  # host:port of the receiver, to whose transfer rank 0 has attached
    spec: TransferSpec

    def run(self, read: Callable[[KvRequest], Bytes], channel: Channel) -> None:
        """Implements RankTask.run. This thread receives, so that rank 0 never waits; another one sends."""
        try:
            sender = connector_of(self.config, self.security).connect(self.address, self.spec, is_part=True)
        except Exception as error:  # noqa: BLE001 process boundary: rank 0 reports it
            channel.send(to_outrider_error(error))
            with suppress(RankLostError):
                while True:  # rank 0 reads the answer when it has told of all frames
                    channel.receive(begins_within_seconds=None)
            return
        messages: queue.SimpleQueue[RankFrame | End] = queue.SimpleQueue()
        thread = threading.Thread(target=_send_frames, args=(sender, messages, read, channel), name="kv-push")
        thread.start()
        try:
            while True:
                message: RankFrame | End = channel.receive(begins_within_seconds=None)
                if isinstance(message, End) and not message.is_complete:
                    sender.interrupt()
                messages.put(message)
        except RankLostError:  # rank 0 has closed the channel after the answer, or is gone
            sender.interrupt()
            messages.put(End(is_complete=False))
        thread.join()


@functools.cache
def connector_of(config: KvTransferConfig, security: SecurityConfig) -> Connector:
    """Returns the connector that all transfers of this process share. KV on a GPU passes through main memory."""
    return Connector(config, PeerSecurity(security))


def _send_frames(
    sender: Sender,
    messages: queue.SimpleQueue[RankFrame | End],
    read: Callable[[KvRequest], Bytes],
    channel: Channel,
) -> None:
    """Sends frames until the End, then answers. After the answer, no KV is read."""
    pushed = PushedParts()
    sender.when_acknowledged(pushed.acknowledge)
    answer: RankPushed | OutriderError
    try:
        while True:
            try:
                message = messages.get(timeout=sender.keep_alive_seconds)
            except queue.Empty:
                sender.keep_alive()
                continue
            if isinstance(message, End):
                break
            started_at, num_bytes = time.monotonic(), sender.payload_bytes
            sender.put(message.region, read(message.request))
            pushed.add(started_at, sender.payload_bytes - num_bytes, last_frame=sender.num_frames)
        checksums = sender.settle()
        answer = RankPushed(checksums, sender.payload_bytes, pushed.settle(time.monotonic()))
    except Exception as error:  # noqa: BLE001 thread boundary: rank 0 reports it
        answer = to_outrider_error(error)
    with suppress(RankLostError):
        channel.send(answer)
    sender.cancel()  # does nothing after `settle`


class RankPushes:
    """Rank 0's view of one transfer's pushes in other ranks. It belongs to the push's thread."""

    def __init__(self, ranks: RankGroup, task: RankPush) -> None:
        self._ranks = ranks
        self._task = task
        self._channels: dict[int, Channel] = {}  # by rank

    @staticmethod
    def prepare(ranks: RankGroup) -> None:
        """Makes other ranks import what they need, so that the first push does not wait. Returns at once."""
        for rank in range(1, ranks.size):
            ranks.start(rank, Preparation()).close()

    def put(self, rank: int, frame: RankFrame) -> None:
        """Makes another rank send a frame. Raises: RankLostError."""
        channel = self._channels.get(rank)
        if channel is None:
            channel = self._channels[rank] = self._ranks.start(rank, self._task)
        channel.send(frame)

    def settle(self, sender: Sender) -> list[TimedPart]:
        """Waits until the receiver has what other ranks send, and includes it in the commit of rank 0's `sender`.

        Returns the parts that they have sent. Raises: the error of a rank; what `sender.keep_alive` raises.
        """
        for channel in self._channels.values():
            channel.send(End(is_complete=True))
        parts: list[TimedPart] = []
        for rank in list(self._channels):
            while not self._channels[rank].has_message(sender.keep_alive_seconds):
                sender.keep_alive()
            answer = self._take_answer(rank)
            if isinstance(answer, OutriderError):
                raise answer
            sender.include(answer.checksums, num_bytes=answer.num_bytes)
            parts += answer.parts
        return parts

    def cancel(self) -> None:
        """Ends what other ranks still send. Afterwards they read no KV of the transfer."""
        for channel in self._channels.values():
            with suppress(RankLostError):
                channel.send(End(is_complete=False))
        for rank in list(self._channels):
            with suppress(RankLostError):
                self._take_answer(rank)

    def _take_answer(self, rank: int) -> RankPushed | OutriderError:
        """Raises: RankLostError, after killing the rank, if it does not answer."""
        return self._ranks.take_answer(rank, self._channels.pop(rank))


def to_outrider_error(error: Exception) -> OutriderError:
    """Returns the error that a push reports."""
    return error if isinstance(error, OutriderError) else InternalError(f"push failed: {describe_error(error)}")
