"""What may happen to a request. Imported as `on`; a decode node's events are those of `outrider.session`.

An event that concerns one attempt names it by the id of its sequence group.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.errors import OutriderError, PeerLostError
from outrider.prefill import PrefillFigures
from outrider.session import Rejected, SequenceGroupEvent
from router.requests.answer import Answer


@dataclass(frozen=True, slots=True)
class Node:
    """A node's process, as it was when an attempt got it."""

    name: str
    incarnation: bytes
    numerics: str


class Timer(enum.Enum):
    """What a request waits for, at most once each; the first two are an attempt's."""

    GRANT = enum.auto()
    KV = enum.auto()  # and its logprobs, once the prefill node or the decode node says that it is done
    RETRY = enum.auto()  # of a search for a second decode node
    STATS = enum.auto()  # those of the prefill node, once all samples have ended
    WINDOW = enum.auto()  # the resume window, while nobody reads


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt is encoded, memory is reserved: the request may be served."""

    answer: Answer
    was_admitted: bool = False  # by a router that is gone: the queue does not refuse it


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes are reserved for an attempt."""

    place: Any  # the driver's handle
    decode: Node
    prefill: Node | None  # None: the decode node computes the prompt
    kv_salt: bytes  # of the KV that these nodes make together
    is_hedge: bool = False


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """The queue has refused the request, or no node may be hedged with."""

    error: OutriderError | None = None


class ReaderAttached(NamedTuple):
    """A client's stream reads the answer."""


class ReaderLeft(NamedTuple):
    """A call that could read the answer is over; perhaps another one reads."""


class AbortRequested(NamedTuple):
    """The client wants no more tokens."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot go on here: it ends with this error, unless all its samples have ended."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Dropped:
    """The answer is forgotten now. Without an error its client has left, or its window has ended."""

    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: Timer
    sequence_group_id: bytes = b""  # an attempt's


@dataclass(frozen=True, slots=True)
class DecodeNodeChanged:
    """The node became late, is on time again, or drains."""

    sequence_group_id: bytes
    is_late: bool
    is_draining: bool


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The decode node's session broke: the node has freed the group."""

    sequence_group_id: bytes
    error: PeerLostError


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill call has its result. A call that was stopped has none."""

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

# ---------------------------------------------------------------- what an attempt's event means for its request


@dataclass(frozen=True, slots=True)
class Changed:
    """The request should look at its attempts again: first tokens, a sample's end, a node late or on time."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Every sample that was opened has ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node keeps nothing of it."""

    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Lost:
    """The work is gone, or must not go on where it was. What the answer has is kept."""

    error: PeerLostError
    cause: str  # a label of `outrider:moves_total`
    is_counted: bool = True  # False: planned, or counted before


@dataclass(frozen=True, slots=True)
class Fatal:
    """The attempt failed for a reason that another node would not cure."""

    error: OutriderError


Outcome = Changed | Completed | Refused | Lost | Fatal
