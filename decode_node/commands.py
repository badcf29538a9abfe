"""What crosses into the engine thread: frozen values, one class for each thing that can happen."""

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
    """What a router asks for."""

    session_id: int
    message: SequenceGroupCommand
    kv_host: str = ""  # of an open: under which host this node was reached
    compiled: Future[Any] | None = None  # of an open: its constraint, kept until the group ends: samples start quickly


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The lease is over: everything of this session is freed."""

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
    """No new groups from here on."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """What still runs is given up."""


OwnCommand = SessionEnded | TransferCompleted | TransferFailed | DrainStarted | DrainExpired | StartProfile | EndProfile
"""What this node says to itself."""

Command = RouterCommand | OwnCommand

EventsBySession = Mapping[int, Sequence[SequenceGroupEvent]]
"""What the engine thread has to tell each router, in order."""


def only_admits(command: Command) -> bool:
    """Whether it leaves running sequences as they are.

    It opens a group, concerns one that waits for its KV, or refuses new ones.
    """
    if isinstance(command, RouterCommand):
        return not isinstance(command.message, CancelSequenceGroup)
    return isinstance(command, TransferCompleted | TransferFailed | DrainStarted)
