"""Commands to the engine thread: frozen values, one class for each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outrider.kv_transfer.base import TransferStats
from outrider.profile import EndProfile, StartProfile
from outrider.session import CancelSequenceGroup, SequenceGroupCommand, SequenceGroupEvent


@dataclass(frozen=True, slots=True)
class RouterCommand:
    """A router's command."""

    session_id: int
    message: SequenceGroupCommand
    # The following belong to an OpenSequenceGroup:
    kv_host: str = ""  # the host name by which the router reached this node
    compiled: Future[Any] | None = None  # compiled constraint, kept until the group ends so that samples start faster


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The end of a router's lease, which frees all groups of its session."""

    session_id: int


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class TransferFailed:
    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The start of a drain. From then on, new groups are refused."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """The deadline of a drain, at which the remaining groups fail."""


OwnCommand = SessionEnded | TransferCompleted | TransferFailed | DrainStarted | DrainExpired | StartProfile | EndProfile
"""Commands of this node itself."""

Command = RouterCommand | OwnCommand

EventsBySession = Mapping[int, Sequence[SequenceGroupEvent]]
"""Events for each router, in order, by session id."""


def is_safe_during_step(command: Command) -> bool:
    """Returns whether a command leaves running sequences unchanged, so that it may be handled during a step.

    Such a command opens a group, concerns a group that waits for its KV, or starts a drain.
    """
    if isinstance(command, RouterCommand):
        return not isinstance(command.message, CancelSequenceGroup)
    return isinstance(command, TransferCompleted | TransferFailed | DrainStarted)
