"""The events of a request, imported as `on`. The events of a decode node are in `outrider.session`.

An event that concerns one attempt has the id of its sequence group.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError, PeerLostError
from outrider.prefill import PrefillFigures
from outrider.session import Rejected, SequenceGroupEvent
from router.requests.answer import Answer


@dataclass(frozen=True, slots=True)
class Node:
    """A node's process at the time when an attempt was placed on it."""

    name: str
    incarnation: bytes
    numerics: str


class Timer(enum.Enum):
    """A request's timers, at most one of each kind. GRANT and KV belong to an attempt, the others to the request."""

    GRANT = enum.auto()
    KV = enum.auto()  # wait for the missing KV or logprobs, after one of the two nodes has reported its end
    RETRY = enum.auto()  # pause before another search for a second decode node
    STATS = enum.auto()  # wait for the prefill node's statistics, after all samples have ended
    WINDOW = enum.auto()  # the resume window, which runs while there is no reader


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt is encoded and memory is reserved, so the request can be served."""

    answer: Answer
    was_admitted: bool = False  # whether a router that is gone admitted the request; the queue must not reject it then


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes are reserved for an attempt."""

    place: Any  # the driver's handle
    decode: Node
    prefill: Node | None  # None: the decode node computes the prompt
    kv_salt: bytes  # salt for the hashes of the KV blocks that these nodes compute
    is_hedge: bool = False


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """The queue has rejected the request, or no node is available for a hedge."""

    error: OutriderError | None = None  # the queue's error; None: the search was for a hedge


@dataclass(frozen=True, slots=True)
class ReaderAttached:
    """A client's stream has begun to read the answer."""


@dataclass(frozen=True, slots=True)
class ReaderLeft:
    """A call that may have read the answer has ended. There may be another reader."""


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client wants no more tokens."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends with this error, unless all its samples have ended."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Dropped:
    """The answer is dropped at once."""

    error: OutriderError | None = None  # None: the client has left, or the resume window has ended


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: Timer
    sequence_group_id: bytes = b""  # empty: the timer belongs to the request itself


@dataclass(frozen=True, slots=True)
class DecodeNodeChanged:
    """The decode node became late, is on time again, or drains."""

    sequence_group_id: bytes
    is_late: bool
    is_draining: bool


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The decode node's session has ended, and the node has freed the group."""

    sequence_group_id: bytes
    error: PeerLostError


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill call has ended by itself. A stopped call sends no event."""

    sequence_group_id: bytes
    result: PrefillFigures | PeerLostError


@dataclass(frozen=True, slots=True)
class PrefillLate:
    """The prefill node is late, and another one may take over."""

    sequence_group_id: bytes


@dataclass(frozen=True, slots=True)
class PrefillChosen:
    """The response to `ChoosePrefill`."""

    sequence_group_id: bytes
    prefill: Node | None  # None: no other node is available


RequestEvent = Encoded | Placed | NotPlaced | ReaderAttached | ReaderLeft | AbortRequested | Failed | Dropped
AttemptEvent = SequenceGroupEvent | DecodeNodeChanged | SessionLost | PrefillEnded | PrefillLate | PrefillChosen
Event = RequestEvent | AttemptEvent | TimerFired

# ------------------------------------------------------------ outcomes of an attempt's events for its request


@dataclass(frozen=True, slots=True)
class Changed:
    """The request must reconsider its attempts, because first tokens came, a sample ended, or a node changed."""


@dataclass(frozen=True, slots=True)
class Completed:
    """All of the attempt's samples have ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node has rejected the attempt, and holds nothing for it."""

    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt cannot continue on its nodes. The answer keeps its tokens."""

    error: PeerLostError
    cause: str  # a label of `outrider:moves_total`
    is_counted: bool = True  # whether it counts against the failure budget; False: it was planned or is already counted


@dataclass(frozen=True, slots=True)
class Fatal:
    """The attempt failed, and would fail on any other node too."""

    error: OutriderError


Outcome = Changed | Completed | Refused | Lost | Fatal
