"""The instructions of a request's machine, imported as `do`. `router.requests.driver` performs them in order."""

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
    SampleTokens,
)
from router.requests.events import Timer
from router.scheduling.placement import Demand


class Instruction:
    """An instruction to the driver."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AttemptInstruction(Instruction):
    """An instruction about one attempt's nodes, performed by `router.requests.attempt_nodes.AttemptNodes`."""

    sequence_group_id: bytes  # the attempt's


@dataclass(frozen=True, slots=True)
class Enqueue(Instruction):
    """Wait for a place. `Placed` or `NotPlaced` follows, unless `LeaveQueue` comes first."""

    demand: Demand
    bypasses_limits: bool  # whether the request is exempt from the queue's bounds
    is_undisplaceable: bool  # whether the request is exempt from displacement by other requests


@dataclass(frozen=True, slots=True)
class ChangeDemand(Instruction):
    """Change the demand of the queued request, which keeps its turn."""

    demand: Demand


@dataclass(frozen=True, slots=True)
class LeaveQueue(Instruction):
    """Leave the queue. If a place has just been assigned, return it."""


@dataclass(frozen=True, slots=True)
class Hedge(Instruction):
    """Find a place at once, without queueing, because a node of an attempt is late. `Placed` or `NotPlaced` follows."""

    demand: Demand
    late_group_id: bytes


@dataclass(frozen=True, slots=True)
class ReturnPlace(Instruction):
    """Release the place of a `Placed` that arrived too late."""

    place: Any


@dataclass(frozen=True, slots=True)
class OpenGroup(Instruction):
    """Send the command to the place's decode node, and pass the group's events to the machine."""

    command: OpenSequenceGroup
    place: Any


@dataclass(frozen=True, slots=True)
class StartPrefill(AttemptInstruction):
    """Have the place's prefill node fill the reservation.

    `PrefillEnded` follows, unless `StopPrefill` comes first. `PrefillLate` may precede either.
    """

    granted: Granted
    may_read_held: bool


@dataclass(frozen=True, slots=True)
class StopPrefill(AttemptInstruction):
    """Cancel the prefill call, and ignore its result."""


@dataclass(frozen=True, slots=True)
class ChoosePrefill(AttemptInstruction):
    """Replace the prefill node with another one of the same numerics. `PrefillChosen` follows."""

    avoided: frozenset[bytes]  # incarnations of nodes that have failed the request


@dataclass(frozen=True, slots=True)
class Retarget(AttemptInstruction):
    """Have the decode node expect another transfer, or compute the prompt if there is none."""

    transfer_id: bytes  # empty: there is no other transfer
    keeps_received: bool


@dataclass(frozen=True, slots=True)
class ReleasePrefill(AttemptInstruction):
    """Release the prefill node, because the prompt is computed or the decode node computes it."""


@dataclass(frozen=True, slots=True)
class CancelSamples(AttemptInstruction):
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseAttempt(AttemptInstruction):
    """Release the place, and stop listening to the group."""

    why: str  # for logs and traces; empty: the attempt has done its work
    must_cancel: bool  # whether the decode node still has the group
    rejected: Rejected | None = None  # the decode node's answer, if it had no room or lacked the adapter
    frees_hedge: bool = False  # whether a hedge gave no tokens, so that another request may be hedged


@dataclass(frozen=True, slots=True)
class Blame(Instruction):
    """Record a failure of the node in its circuit breaker."""

    sequence_group_id: bytes
    role: NodeRole
    incarnation: bytes  # of the node
    may_be_request: bool  # whether the request itself may be at fault


@dataclass(frozen=True, slots=True)
class Forgive(Instruction):
    """Withdraw the blame from nodes, because the request itself is at fault."""

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
    """Record tokens that the answer has taken, and charge the answer's memory for those that are new to it."""

    tokens: SampleTokens
    num_new: int  # number of new tokens; 0: the answer has all of them, or their sample has ended
    is_first: bool  # whether `tokens` are the attempt's first, which show that its nodes work


@dataclass(frozen=True, slots=True)
class RecordGrant(AttemptInstruction):
    granted: Granted


@dataclass(frozen=True, slots=True)
class RecordKv(AttemptInstruction):
    ready: KvReady


@dataclass(frozen=True, slots=True)
class RecordMigration(Instruction):
    """Record that another decode or prefill node continues the work of `node`."""

    node: str
    cause: str  # a label of `outrider:moves_total`
    error: PeerLostError | None = None


@dataclass(frozen=True, slots=True)
class RecordEnd(Instruction):
    """Record that the last sample has ended."""


@dataclass(frozen=True, slots=True)
class Summarize(Instruction):
    """Complete the answer with its summary."""


@dataclass(frozen=True, slots=True)
class SettleRequest(Instruction):
    """Write the receipt and settle the memory account, because the work has ended. Once per request."""


@dataclass(frozen=True, slots=True)
class FreeKey(Instruction):
    """Free the request's key. This is the last instruction of a request, which then holds nothing any more."""

    has_client_left: bool
