"""Versions of the internal protocol, and the one that two processes speak with each other. Torch-free.

Every hello carries a range, so that a rollout may mix versions: a release that changes the
protocol still speaks the version before, and the one after it no longer does.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import MismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolVersions:
    """The versions that a process speaks: all from `oldest` to `newest`."""

    oldest: int
    newest: int

    @classmethod
    def of_hello(cls, *, oldest: int, newest: int) -> ProtocolVersions:
        """As a peer has sent them. Processes of version 1 knew no range: `oldest` is 0 there."""
        return cls(oldest=oldest or newest, newest=newest)

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SUPPORTED_VERSIONS = ProtocolVersions(oldest=3, newest=4)
"""What this build speaks. 4: features go along with what is committed, to draft nodes that say that they need them."""


def negotiate(ours: ProtocolVersions, theirs: ProtocolVersions, *, us: str, them: str) -> int:
    """The newest version that both sides speak; each finds the same one from the other's hello.

    Args:
        ours: of this process.
        theirs: of the peer.
        us: this process, for the message: "decode node decode@h:1".
        them: the peer.

    Raises: MismatchError that names both ranges, where they do not overlap.
    """
    newest = min(ours.newest, theirs.newest)
    if newest < max(ours.oldest, theirs.oldest):
        raise MismatchError(
            f"{them} speaks protocol {theirs}, {us} speaks protocol {ours}", reason="PROTOCOL_VERSION_MISMATCH"
        )
    return newest
