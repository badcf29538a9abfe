"""The events of a request. Imported as `on`; a decode node's events are those of `outrider.session`.

An event that concerns one attempt names it by the id of its sequence group.
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
    """A request's timers. At most one of each kind runs. GRANT and KV belong to an attempt, the rest to the request."""

    GRANT = enum.auto()
    KV = enum.auto()  # time to complete KV and logprobs, once the prefill node or the decode node reports the end
    RETRY = enum.auto()  # another search for a second decode node
    STATS = enum.auto()  # the prefill node's statistics, once all samples have ended
    WINDOW = enum.auto()  # the resume window, while there is no reader


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt is encoded and memory is reserved: the request can be served."""

    answer: Answer
    was_admitted: bool = False  # by a router that is gone, so the queue does not reject it


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes are reserved for an attempt."""

    place: Any  # the driver's handle
    decode: Node
    prefill: Node | None  # None: the decode node computes the prompt
    kv_salt: bytes  # for KV that these nodes compute together
    is_hedge: bool = False


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """The queue has rejected the request, or no node is available for a hedge."""

    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class ReaderAttached:
    """A client's stream has begun to read the answer."""


@dataclass(frozen=True, slots=True)
class ReaderLeft:
    """A call that may have read the answer has ended; there may be another reader."""


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client wants no more tokens."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot continue here: it ends with this error, unless all its samples have ended."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Dropped:
    """The answer is dropped now. Without an error its client has left, or its window has ended."""

    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: Timer
    sequence_group_id: bytes = b""  # the attempt's, if the timer is an attempt's


@dataclass(frozen=True, slots=True)
class DecodeNodeChanged:
    """The node became late, is on time again, or drains."""

    sequence_group_id: bytes
    is_late: bool
    is_draining: bool


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The decode node's session has ended: the node has freed the group."""

    sequence_group_id: bytes
    error: PeerLostError


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill call has its result. A stopped call has none."""

    sequence_group_id: bytes
    result: PrefillFigures | PeerLostError


@dataclass(frozen=True, slots=True)
class PrefillLate:
    """The prefill node is late, and another one may take over."""

    sequence_group_id: bytes


@dataclass(frozen=True, slots=True)
class PrefillChosen:
    """Answers `ChoosePrefill`. None: no other node is available."""

    sequence_group_id: bytes
    prefill: Node | None


AttemptEvent = (
    SequenceGroupEvent | DecodeNodeChanged | SessionLost | PrefillEnded | PrefillLate | PrefillChosen | TimerFired
)
RequestEvent = (
    Encoded | Placed | NotPlaced | ReaderAttached | ReaderLeft | AbortRequested | Failed | Dropped | TimerFired
)
Event = AttemptEvent | RequestEvent

# -------------------------------------------------------------- outcomes of an attempt's events, for its request


@dataclass(frozen=True, slots=True)
class Changed:
    """The request should reconsider its attempts: first tokens, a sample's end, a node late or on time."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Every sample that was opened has ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node has rejected the attempt and holds nothing of it."""

    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt's work is lost, or must not continue on its node. The answer's tokens are retained."""

    error: PeerLostError
    cause: str  # a label of `outrider:moves_total`
    is_counted: bool = True  # False: the loss was planned, or counted before


@dataclass(frozen=True, slots=True)
class Fatal:
    """The attempt failed for a reason that another node would not fix."""

    error: OutriderError


Outcome = Changed | Completed | Refused | Lost | Fatal
