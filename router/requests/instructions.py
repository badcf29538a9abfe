"""The instructions of a request's machine. Imported as `do`; `router.requests.driver` performs them in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import PeerLostError
from outrider.node import NodeRole
from outrider.session import (
    Granted,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    RetargetSequenceGroup,
    SampleTokens,
)
from router.requests.events import Timer
from router.scheduling.placement import Demand


class Instruction:
    """An instruction to the driver. If it concerns one attempt, it names the attempt by its sequence group."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Enqueue(Instruction):
    """Wait for a place. `Placed` or `NotPlaced` follows, unless `LeaveQueue` comes first."""

    demand: Demand
    is_accepted: bool  # exempt from the queue's bounds
    is_kept: bool  # exempt from displacement by other requests


@dataclass(frozen=True, slots=True)
class ChangeDemand(Instruction):
    """Wait for a place with another demand from now on, in the same turn."""

    demand: Demand


@dataclass(frozen=True, slots=True)
class LeaveQueue(Instruction):
    """Leave the queue, and return a place that has just been assigned."""


@dataclass(frozen=True, slots=True)
class Hedge(Instruction):
    """Find a place now, without a queue, because this attempt's node is late. `Placed` or `NotPlaced` follows."""

    demand: Demand
    late_group_id: bytes


@dataclass(frozen=True, slots=True)
class ReturnPlace(Instruction):
    """Release the place of a `Placed` that arrived too late."""

    place: Any


@dataclass(frozen=True, slots=True)
class OpenGroup(Instruction):
    """Send the command to the place's decode node, and forward the group's events."""

    command: OpenSequenceGroup
    place: Any


@dataclass(frozen=True, slots=True)
class StartPrefill(Instruction):
    """Have the place's prefill node fill the reservation; `PrefillEnded` follows, `PrefillLate` may."""

    sequence_group_id: bytes
    granted: Granted
    may_read_held: bool


@dataclass(frozen=True, slots=True)
class StopPrefill(Instruction):
    sequence_group_id: bytes


@dataclass(frozen=True, slots=True)
class ChoosePrefill(Instruction):
    """Reserve another prefill node of the same numerics. `PrefillChosen` follows."""

    sequence_group_id: bytes
    avoided: frozenset[bytes]  # processes that have lost the request


@dataclass(frozen=True, slots=True)
class Retarget(Instruction):
    command: RetargetSequenceGroup


@dataclass(frozen=True, slots=True)
class ReleasePrefill(Instruction):
    """Release the prefill node: the prompt is computed, or the decode node computes it."""

    sequence_group_id: bytes


@dataclass(frozen=True, slots=True)
class CancelSamples(Instruction):
    sequence_group_id: bytes
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseAttempt(Instruction):
    """Release the place, and stop listening to the group."""

    sequence_group_id: bytes
    why: str  # for people; empty: the attempt has done its work
    must_cancel: bool  # the decode node still has the group
    rejected: Rejected | None = None  # the decode node had no room
    frees_hedge: bool = False  # the hedge was not needed: another one may be opened


@dataclass(frozen=True, slots=True)
class Blame(Instruction):
    """Keep other requests away from a node that has failed the attempt."""

    sequence_group_id: bytes
    role: NodeRole
    incarnation: bytes  # of the node's process
    may_be_request: bool  # the request may have caused the failure itself


@dataclass(frozen=True, slots=True)
class Forgive(Instruction):
    """Withdraw the blame of nodes' processes: the request itself is the cause."""

    incarnations: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SetTimer(Instruction):
    timer: Timer
    at: float  # by the clock of `Request.step`
    sequence_group_id: bytes = b""


@dataclass(frozen=True, slots=True)
class StopTimer(Instruction):
    timer: Timer
    sequence_group_id: bytes = b""


@dataclass(frozen=True, slots=True)
class Deliver(Instruction):
    """Record tokens that the answer has taken, and charge the memory of the `num_new` that are new to it."""

    tokens: SampleTokens
    num_new: int
    is_first: bool  # first tokens of the attempt, which show that its nodes work


@dataclass(frozen=True, slots=True)
class RecordGrant(Instruction):
    granted: Granted


@dataclass(frozen=True, slots=True)
class RecordKv(Instruction):
    ready: KvReady


@dataclass(frozen=True, slots=True)
class RecordMigration(Instruction):
    """Record that the next tokens come from a node other than this one, or are computed with another's help."""

    node: str
    cause: str  # a label of `outrider:moves_total`
    error: PeerLostError | None = None


@dataclass(frozen=True, slots=True)
class RecordEnd(Instruction):
    """Record that the last sample has ended."""


@dataclass(frozen=True, slots=True)
class Summarize(Instruction):
    """Close the answer with its summary."""


@dataclass(frozen=True, slots=True)
class SettleRequest(Instruction):
    """Write the receipt and settle the account, because nothing is computed any more. Once per request."""


@dataclass(frozen=True, slots=True)
class FreeName(Instruction):
    """Free the key of a request that holds nothing any more. Once per request, as the last instruction."""

    has_client_left: bool
