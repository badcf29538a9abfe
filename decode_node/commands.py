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
    kv_host: str = ""  # for an open: the host name under which the router reached this node
    compiled: Future[Any] | None = None  # an open's constraint, kept until the group ends so that samples start fast


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The end of a lease: everything of the session is freed."""

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
    """The begin of a drain: new groups are refused."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """The deadline of a drain: remaining groups are failed."""


OwnCommand = SessionEnded | TransferCompleted | TransferFailed | DrainStarted | DrainExpired | StartProfile | EndProfile
"""Commands of this node itself."""

Command = RouterCommand | OwnCommand

EventsBySession = Mapping[int, Sequence[SequenceGroupEvent]]
"""Events for each router, in order, by session id."""


def only_admits(command: Command) -> bool:
    """Returns whether a command leaves running sequences as they are.

    Such a command opens a group, concerns one that waits for its KV, or refuses new ones.
    """
    if isinstance(command, RouterCommand):
        return not isinstance(command.message, CancelSequenceGroup)
    return isinstance(command, TransferCompleted | TransferFailed | DrainStarted)
