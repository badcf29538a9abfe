"""A channel of pickled values between two ranks of one node, over a socket pair. Torch-free."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any

from outrider.errors import InternalError

_LENGTH = struct.Struct("<Q")


class RankLostError(InternalError):
    """Raised if a process of a node with several ranks has ended or does not answer, so that steps are impossible."""

    reason = "RANK_LOST"


class Channel:
    """One end of a channel. At most one thread may send and one may receive at a time.

    Pickling is safe here: both ends are processes of this node, and the sockets have no address.

    Raises: RankLostError if the peer is gone or too slow; the channel is then closed.
    """

    def __init__(self, end: socket.socket, *, peer: str, timeout_seconds: float) -> None:
        """`peer`: the peer's name in error messages, such as "rank 1".

        `timeout_seconds`: timeout for sending, and for receiving the rest of a message whose beginning has arrived.
        """
        self._end = end
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        end.settimeout(timeout_seconds)

    @staticmethod
    def encode(message: object) -> bytes:
        """Encodes a message once, so that `send_encoded` can send it to several peers."""
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)

    def send(self, message: object) -> None:
        self.send_encoded(self.encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        try:
            self._end.sendall(_LENGTH.pack(len(encoded)))
            self._end.sendall(encoded)
        except OSError as error:
            raise self._lost("accepts no messages", error) from error

    def receive(self, *, begins_within_seconds: float | None) -> Any:
        """Returns the next message. `begins_within_seconds`: timeout until its first byte; None: no timeout."""
        try:
            self._end.settimeout(begins_within_seconds)
            if not self._end.recv(1, socket.MSG_PEEK):
                raise EOFError
            self._end.settimeout(self._timeout_seconds)
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            return pickle.loads(self._read(length))  # noqa: S301 from a process of this node, see above
        except (OSError, EOFError) as error:
            raise self._lost("sends nothing", error) from error

    def has_message(self, seconds: float) -> bool:
        """Waits at most this long for a message or the end of the channel. Returns whether `receive` will not wait."""
        poll = select.poll()  # select.select takes no descriptor from 1024 on
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Closes this end, which the peer notices. Idempotent."""
        self._end.close()

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            num_read = self._end.recv_into(view)
            if not num_read:
                raise EOFError
            view = view[num_read:]
        return buffer

    def _lost(self, what: str, error: Exception) -> RankLostError:
        self.close()
        cause = (
            "its end of the channel is closed" if isinstance(error, EOFError) else str(error) or type(error).__name__
        )
        return RankLostError(f"{self._peer} {what}: {cause}")
