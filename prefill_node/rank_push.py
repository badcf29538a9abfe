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
from outrider.service.telemetry.logging import get_logger
from prefill_node.pushed_parts import PushedParts

log = get_logger("prefill_node")

POLL_SECONDS = 0.1
"""Seconds between checks whether a push was interrupted, while it waits for other ranks."""


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
    """A task that prepares a rank for its first push, since importing this module takes a second."""

    config: KvTransferConfig
    security: SecurityConfig

    def run(self, read: Callable[[KvRequest], Bytes], channel: Channel) -> None:
        """Implements RankTask.run."""
        connector_of(self.config, self.security)


@dataclass(frozen=True, slots=True)
class RankPush:
    """The task of a rank in one transfer."""

    config: KvTransferConfig
    security: SecurityConfig
    address: str  # host:port of the receiver, to whose transfer rank 0 has attached
    spec: TransferSpec

    def run(self, read: Callable[[KvRequest], Bytes], channel: Channel) -> None:
        """Implements RankTask.run. After the answer, no KV is read."""
        messages = _Messages(channel)
        sender: Sender | None = None
        answer: RankPushed | OutriderError
        try:
            sender = connector_of(self.config, self.security).connect(self.address, self.spec, is_part=True)
            messages.interrupts(sender)
            answer = _send_frames(sender, messages, read)
        except Exception as error:  # noqa: BLE001 process boundary: rank 0 reports it
            answer = to_outrider_error(error)
        with suppress(RankLostError):
            channel.send(answer)
        if sender is not None:
            sender.cancel()  # does nothing after `settle`
        messages.join()


class _Messages:
    """Rank 0's messages. A thread receives them, so that rank 0 never waits, until rank 0 closes the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.queue: queue.SimpleQueue[RankFrame | End] = queue.SimpleQueue()
        self._sender: Sender | None = None
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._receive, name="rank-task-messages", daemon=True)
        self._thread.start()
        self.join = self._thread.join

    def interrupts(self, sender: Sender) -> None:
        """Makes the end of a failed push interrupt this sender, at once if it has come already."""
        self._sender = sender
        if self._is_cancelled:
            sender.interrupt()

    def _receive(self) -> None:
        try:
            while True:
                message: RankFrame | End = self._channel.receive(begins_within_seconds=None)
                if isinstance(message, End) and not message.is_complete:
                    self._cancel()
                self.queue.put(message)
        except RankLostError:
            return  # rank 0 has read the answer, or is gone
        finally:
            self._cancel()
            self.queue.put(End(is_complete=False))

    def _cancel(self) -> None:
        self._is_cancelled = True
        if (sender := self._sender) is not None:
            sender.interrupt()


def _send_frames(sender: Sender, messages: _Messages, read: Callable[[KvRequest], Bytes]) -> RankPushed:
    """Sends frames until the End. Raises: what the sender and `read` raise."""
    pushed = PushedParts()
    sender.when_acknowledged(pushed.acknowledge)
    while True:
        try:
            message = messages.queue.get(timeout=sender.keep_alive_seconds)
        except queue.Empty:
            sender.keep_alive()
            continue
        if isinstance(message, End):
            checksums = sender.settle()
            return RankPushed(checksums, sender.payload_bytes, pushed.settle(time.monotonic()))
        payload = read(message.request)
        started_at, num_bytes = time.monotonic(), sender.payload_bytes
        sender.put(message.region, payload)
        pushed.add(started_at, sender.payload_bytes - num_bytes, last_frame=sender.num_frames)


@functools.cache
def connector_of(config: KvTransferConfig, security: SecurityConfig) -> Connector:
    """Returns the connector that all transfers of this process share. KV on a GPU passes through main memory."""
    return Connector(config, PeerSecurity(security))


class RankPushes:
    """Rank 0's view of one transfer's pushes in other ranks. It belongs to the push's thread."""

    def __init__(self, ranks: RankGroup, task: RankPush) -> None:
        self._ranks = ranks
        self._task = task
        self._channels: dict[int, Channel] = {}  # by rank

    @staticmethod
    def prepare(ranks: RankGroup, connector: Connector) -> None:
        """Prepares other ranks, so that the first push does not wait for them. Returns at once."""
        for rank in range(1, ranks.size):
            ranks.start(rank, Preparation(connector.config, connector.security.config)).close()

    def put(self, rank: int, frame: RankFrame) -> None:
        """Makes another rank send a frame. Raises: RankLostError; the rank's error, if it has failed."""
        channel = self._channels.get(rank)
        if channel is None:
            channel = self._channels[rank] = self._ranks.start(rank, self._task)
        if channel.has_message(0):
            self._take_answer(rank)
        channel.send(frame)

    def settle(self, sender: Sender) -> list[TimedPart]:
        """Waits until the receiver has what other ranks send, and includes it in the commit of rank 0's `sender`.

        Returns the parts that they have sent. Raises: the error of a rank; what `sender.keep_alive` raises.
        """
        if self._channels:
            sender.keep_alive()  # raises if the push was interrupted
        for channel in self._channels.values():
            channel.send(End(is_complete=True))
        parts: list[TimedPart] = []
        for rank, channel in list(self._channels.items()):
            while not channel.has_message(POLL_SECONDS):
                sender.keep_alive()
            answer = self._take_answer(rank)
            sender.include(answer.checksums, num_bytes=answer.num_bytes)
            parts += answer.parts
        return parts

    def cancel(self) -> None:
        """Makes other ranks stop sending. When it returns, they no longer read KV of the transfer."""
        for channel in self._channels.values():
            with suppress(RankLostError):
                channel.send(End(is_complete=False))
        for rank in list(self._channels):
            with suppress(OutriderError):
                self._take_answer(rank)

    def _take_answer(self, rank: int) -> RankPushed:
        """Raises: the rank's error; RankLostError, after killing the rank, if it does not answer."""
        answer: RankPushed | OutriderError = self._ranks.take_answer(rank, self._channels.pop(rank))
        if isinstance(answer, OutriderError):
            raise answer
        return answer


def to_outrider_error(error: Exception) -> OutriderError:
    """Returns the error that a push reports, and logs it with its traceback if it is a bug."""
    if isinstance(error, OutriderError):
        return error
    log.error("push failed", error=str(error), exc_info=error)
    return InternalError(f"push failed: {describe_error(error)}")
