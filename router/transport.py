"""What the router asks of a node, in values. The wire is one way to carry it, a simulation another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from outrider.node import NodeInfo, NodeReport
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.session import SequenceGroupCommand, SequenceGroupEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """How this router introduces itself to decode nodes."""

    name: str
    incarnation: bytes  # 16 random bytes, from the start of the process


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """One message of a decode node. `hello` comes with the first."""

    hello: NodeInfo | None
    report: NodeReport
    events: tuple[SequenceGroupEvent, ...]


class SessionStream(Protocol):
    """One session with a decode node, both directions. Every method raises OutriderError when it is broken."""

    async def write(self, command: SequenceGroupCommand | None) -> None:
        """Sends a command; None is a heartbeat."""

    async def read(self) -> SessionMessage: ...

    def cancel(self) -> None:
        """Ends the stream at once."""


class NodeTransport(Protocol):
    """One node's address. Every method raises nothing but OutriderErrors."""

    async def identify(self, *, timeout_seconds: float) -> NodeInfo: ...

    async def tokenizer_files(self) -> dict[str, bytes]: ...

    def reports(self, *, incarnation: bytes) -> AsyncGenerator[NodeReport, None]:
        """The reports of this process, until it is lost. Raises: PeerLostError."""

    async def open_session(self, identity: RouterIdentity, *, fingerprint: str) -> SessionStream:
        """Of a decode node; this router's hello has been sent."""

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has a prefill node compute and push. Cancelling stops both."""

    async def close(self) -> None: ...
