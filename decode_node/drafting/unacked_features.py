"""The features of one sequence that are on their way to its draft node."""

from __future__ import annotations

MAX_UNACKED_BYTES = 512 << 10
"""Of one sequence: what its draft node has not acknowledged is kept here, and no more is copied from the plane."""


class UnackedFeatures:
    """Copies of the features that the draft node has not acknowledged, without a gap. Guarded by the book's lock."""

    __slots__ = ("_data", "_size", "num_acked", "num_sent")

    def __init__(self, bytes_per_token: int) -> None:
        self._size = bytes_per_token
        self._data = bytearray()
        self.num_acked = 0  # tokens, from the first on; `_data` begins there
        self.num_sent = 0  # the most that was sent: nobody can acknowledge more

    @property
    def end(self) -> int:
        """Tokens whose features are acknowledged or here: those from this one on are to be copied."""
        return self.num_acked + len(self._data) // self._size

    @property
    def room(self) -> int:
        """Tokens whose features may be added."""
        return (MAX_UNACKED_BYTES - len(self._data)) // self._size

    def add(self, start: int, payload: bytes) -> bool:
        """Copies from the plane. False, and dropped, unless `start` is `end`: the sequence began anew meanwhile."""
        if start != self.end:
            return False
        self._data += payload
        return True

    def take(self, end: int, max_bytes: int) -> tuple[bytes, int]:
        """For one update, those from `num_acked` on and before `end`, and where they end. They stay here."""
        end = max(self.num_acked, min(end, self.end, self.num_acked + max_bytes // self._size))
        self.num_sent = max(self.num_sent, end)
        return bytes(memoryview(self._data)[: (end - self.num_acked) * self._size]), end

    def acknowledge(self, num_tokens: int) -> None:
        """The node holds the features of so many tokens: these are dropped here."""
        if num_tokens > self.num_acked:
            del self._data[: (num_tokens - self.num_acked) * self._size]
            self.num_acked = num_tokens

    def begin_again(self) -> None:
        """The node has nothing: all is copied from the plane again."""
        self._data.clear()
        self.num_acked = 0
