"""What crosses into the engine thread: frozen values, one class for each thing that can happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outrider.kv_transfer.base import TransferStats
from outrider.profile import EndProfile, StartProfile
from outrider.session import CancelSequenceGroup, OpenSequenceGroup, RetargetSequenceGroup, SequenceGroupEvent


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """A router asks for room. `kv_host`: under which host this node was reached."""

    session_id: int
    group: OpenSequenceGroup
    kv_host: str
    compiled: Future[Any] | None = None  # its constraint, kept until the group ends: its samples start quickly


@dataclass(frozen=True, slots=True)
class GroupRetargeted:
    """Another try to fill a group's reservation."""

    session_id: int
    retarget: RetargetSequenceGroup


@dataclass(frozen=True, slots=True)
class GroupCancelled:
    session_id: int
    cancel: CancelSequenceGroup


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


RouterCommand = GroupOpened | GroupRetargeted | GroupCancelled

OwnCommand = SessionEnded | TransferCompleted | TransferFailed | DrainStarted | DrainExpired | StartProfile | EndProfile
"""What this node says to itself."""

Command = RouterCommand | OwnCommand

EventsBySession = Mapping[int, Sequence[SequenceGroupEvent]]
"""What the engine thread has to tell each router, in order."""
