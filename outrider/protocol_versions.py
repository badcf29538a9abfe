"""Versions of the internal protocol, and the choice of the one that two processes speak. Torch-free.

Every hello carries a range, so that a rollout may mix versions: a release that changes the protocol still speaks the
previous version; the release after it no longer does.
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
        """Returns the versions in a peer's hello. Processes of version 1 sent no range: their `oldest` is 0."""
        return cls(oldest=oldest or newest, newest=newest)

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SUPPORTED_VERSIONS = ProtocolVersions(oldest=3, newest=4)
"""The versions of this build. Version 4 added features to committed tokens, for draft nodes that ask for them."""


def negotiate(ours: ProtocolVersions, theirs: ProtocolVersions, *, us: str, them: str) -> int:
    """Returns the newest version that both sides speak. Each side computes the same version from the other's hello.

    Args:
        ours: this process's versions.
        theirs: the peer's.
        us: this process, for the message, e.g. "decode node decode@h:1".
        them: the peer, for the message.

    Raises: MismatchError, which names both ranges, if the ranges do not overlap.
    """
    newest = min(ours.newest, theirs.newest)
    if newest < max(ours.oldest, theirs.oldest):
        raise MismatchError(
            f"{them} speaks protocol {theirs}, {us} speaks protocol {ours}", reason="PROTOCOL_VERSION_MISMATCH"
        )
    return newest
