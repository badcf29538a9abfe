"""The states of a request and of its attempts, and the data that both machines share."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from outrider.errors import POISON_REQUEST, InternalError, PeerLostError
from outrider.rpc.status import UNREACHABLE
from router.requests import instructions as do
from router.requests.answer import Answer
from router.requests.events import Node
from router.scheduling.placement import Demand

MAX_LOST_NODES = 3
"""Number of nodes, of either role and in any attempt, whose failures without a new token in between end a request."""
MAX_FAILED_TRANSFERS = 3
"""Number of failed KV transfers without a new token in between, after which the decode node computes the prompt."""
NODE_FAULT_CAUSES = frozenset({"decode_lost", "decode_silent", "token_mismatch", "protocol", UNREACHABLE})
"""Causes of losses that are the node's fault. Other losses may be the request's own fault."""


class State(enum.Enum):
    """The states of a request: ENCODING → QUEUED ⇄ SERVING → CONCLUDING → ENDED → CLOSED.

    A request may end early from any state.
    """

    ENCODING = enum.auto()  # its text is being encoded and its constraint compiled
    QUEUED = enum.auto()  # no attempt runs; the request may already have tokens
    SERVING = enum.auto()  # one or two attempts run
    CONCLUDING = enum.auto()  # all samples have ended; statistics may still come
    ENDED = enum.auto()  # the answer is complete or has failed, and can be read until the resume window ends
    CLOSED = enum.auto()  # nothing is held anywhere, and the key is free

    @property
    def is_active(self) -> bool:
        """Whether the request waits for nodes or uses them."""
        return self in {State.QUEUED, State.SERVING, State.CONCLUDING}


class AttemptState(enum.Enum):
    """The states of an attempt: OPENING → TRANSFERRING ⇄ RETARGETING → DECODING → COMPLETED.

    There is no transfer if the decode node computes the prompt. Once an attempt has ended, the request drops the
    attempt's late events.
    """

    OPENING = enum.auto()  # the decode node was asked for a reservation
    TRANSFERRING = enum.auto()  # a prefill node computes and pushes KV
    RETARGETING = enum.auto()  # the decode node was asked to expect another transfer
    DECODING = enum.auto()  # tokens arrive
    COMPLETED = enum.auto()  # its samples have ended; its prefill call may still run


class Seeking(enum.Enum):
    """The searches for nodes that a request may have under way, at most one at a time."""

    FIRST = enum.auto()  # in the queue, for an attempt that runs alone
    SECOND = enum.auto()  # in the queue, for an attempt in addition to the running one
    HEDGE = enum.auto()  # not in the queue: the driver answers at once


class InvalidTransitionError(InternalError):
    """The state has no transition for the event."""

    def __init__(self, state: enum.Enum, event: object) -> None:
        super().__init__(f"the state {state.name} has no transition for {type(event).__name__}")


class Cluster(Protocol):
    """The questions that a request may ask about nodes. They have no side effects."""

    def is_usable(self, demand: Demand) -> bool:
        """Whether a serving decode node could take the request once it has room."""

    @property
    def awaits_decode_nodes(self) -> bool:
        """Whether a decode node that is not serving now might accept a request that no serving node can accept."""

    def has_decode_node_on_time(self, demand: Demand) -> bool:
        """Whether a decode node that is not late could take the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A request's timeouts, in seconds, and its source of ids."""

    window_seconds: float | None  # time for the client to resume; None: the answer ends with its only stream
    open_timeout_seconds: float  # time for a decode node to grant or to reject an attempt
    kv_ready_timeout_seconds: float  # time for KV to be complete after the prefill call has ended
    new_id: Callable[[], bytes]  # returns ids for sequence groups and transfers


@dataclass(slots=True)
class FailureBudget:
    """Counts a request's losses since the last new token, because a poison request must not bring down all nodes."""

    num_lost_nodes: int = 0
    num_failed_transfers: int = 0
    avoided: frozenset[bytes] = frozenset()  # incarnations of nodes that have failed the request; never reset
    suspects: set[bytes] = field(default_factory=set)  # incarnations of nodes whose failure the request may have caused
    _num_tokens: int = 0  # generated tokens of the answer at the last reset

    def reset_on_progress(self, num_generated_tokens: int) -> None:
        """Resets the counts if there are new tokens."""
        if num_generated_tokens > self._num_tokens:
            self._num_tokens = num_generated_tokens
            self.num_lost_nodes = self.num_failed_transfers = 0
            self.suspects.clear()

    def add_node(self, incarnation: bytes) -> None:
        """Counts a node that ended, or that failed the request."""
        self.num_lost_nodes += 1
        self.avoided |= {incarnation}

    def add_transfer(self, incarnation: bytes) -> None:
        """Counts a failed transfer from this prefill node."""
        self.num_failed_transfers += 1
        self.avoided |= {incarnation}

    @property
    def may_transfer(self) -> bool:
        return self.num_failed_transfers < MAX_FAILED_TRANSFERS

    @property
    def may_open_second(self) -> bool:
        """Whether a second attempt may run, which it may if the budget allows for the loss of both attempts."""
        return self.num_lost_nodes + 2 <= MAX_LOST_NODES

    def final_error(self, last: PeerLostError) -> PeerLostError | None:
        """Returns the error that ends the request after too many losses; None: the request continues."""
        if self.num_lost_nodes < MAX_LOST_NODES:
            return None
        message = f"{self.num_lost_nodes} nodes failed while serving this request without a new token"
        return PeerLostError(f"{message}; the last: {last.message}", node=last.node, reason=POISON_REQUEST)


@dataclass(slots=True)
class Shared:
    """The state that a request and its attempts share."""

    limits: Limits
    failures: FailureBudget = field(default_factory=FailureBudget)
    maybe_answer: Answer | None = None  # None: the request is being encoded
    excluded: frozenset[bytes] = frozenset()  # incarnations of nodes that can never have room
    was_admitted: bool = False  # whether a decode node has granted room, to this router or to one that is gone
    now: float = 0.0  # monotonic seconds of the current step
    out: list[do.Instruction] = field(default_factory=list)  # the instructions of the current step

    @property
    def answer(self) -> Answer:
        assert self.maybe_answer is not None, "the request has been encoded"
        return self.maybe_answer

    def demand(self, alongside: Node | None = None) -> Demand:
        """Returns the demand of all unfinished samples. Only one sample's tokens count, as all share the prompt's KV.

        `alongside`: the decode node of a running attempt. A second one must run on another node of equal numerics.
        """
        request, samples = self.answer.request, self.answer.unfinished_samples()
        return Demand(
            request.prompt_token_ids + (samples[0].generated_token_ids if samples else ()),
            excluded=self.excluded if alongside is None else self.excluded | {alongside.incarnation},
            kv_salt=request.options.kv_salt,
            num_exact=None if (blend := request.options.blend) is None else blend.piece_lengths[0],
            avoided=self.failures.avoided,
            numerics="" if alongside is None else alongside.numerics,
            is_scored=self.answer.needs_prompt_logprobs,
            num_samples=max(len(samples), 1),
            adapter=request.options.adapter,
        )
