"""The states of a request and of its attempts, and the data that both machines share."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from outrider.errors import InternalError
from router.requests import instructions as do
from router.requests.answer import Answer
from router.requests.events import Node
from router.requests.failures import FailureBudget
from router.scheduling.placement import Demand


class State(enum.Enum):
    """The states of a request."""

    ENCODING = enum.auto()  # its text is being encoded, its constraint compiled
    QUEUED = enum.auto()  # no attempt runs; it may have tokens already
    SERVING = enum.auto()  # one or two attempts run
    CONCLUDING = enum.auto()  # all samples have ended; statistics may still come
    ENDED = enum.auto()  # the answer is complete or has failed, and can be read until its window ends
    CLOSED = enum.auto()  # nothing is held anywhere, and the name is free


class AttemptState(enum.Enum):
    """The states of an attempt. When it has ended, the request forgets it and drops its late events."""

    OPENING = enum.auto()  # the decode node was asked for a reservation
    TRANSFERRING = enum.auto()  # a prefill node computes and pushes KV
    RETARGETING = enum.auto()  # the decode node was asked to expect another transfer
    DECODING = enum.auto()  # tokens arrive
    COMPLETED = enum.auto()  # its samples have ended; its prefill call may still run


class Seeking(enum.Enum):
    """The searches for nodes that a request may have under way, at most one at a time."""

    FIRST = enum.auto()  # in the queue, for an attempt that runs alone
    SECOND = enum.auto()  # in the queue, for an attempt beside one that runs
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
    def may_know_more(self) -> bool:
        """Whether a decode node that is not serving now might accept a request that no serving node can."""

    def has_timely_decode_node(self, demand: Demand) -> bool:
        """Whether a decode node that is not late could take the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A request's timeouts, in seconds, and its source of ids."""

    window_seconds: float | None  # for the client to resume; None: the answer ends with its only stream
    open_timeout_seconds: float  # for a decode node to grant or to reject
    kv_ready_timeout_seconds: float  # for KV to be complete after the prefill call has ended
    new_id: Callable[[], bytes]  # for sequence groups and transfers


@dataclass(slots=True)
class Shared:
    """The state that a request and its attempts share."""

    limits: Limits
    failures: FailureBudget = field(default_factory=FailureBudget)
    maybe_answer: Answer | None = None  # None: the request is being encoded
    excluded: frozenset[bytes] = frozenset()  # processes of decode nodes on which the request can never fit
    was_admitted: bool = False  # a decode node has granted it room, to this router or to one that is gone
    now: float = 0.0  # monotonic seconds of the current step
    out: list[do.Instruction] = field(default_factory=list)  # the instructions of the current step

    @property
    def answer(self) -> Answer:
        assert self.maybe_answer is not None, "the request has been encoded"
        return self.maybe_answer

    def demand(self, alongside: Node | None = None) -> Demand:
        """Returns the demand of the unfinished samples, with the tokens of the first; their KV begins alike.

        `alongside`: the decode node of a running attempt. A second one must run on another node of equal numerics.
        """
        request, samples = self.answer.request, self.answer.unfinished_samples()
        return Demand(
            request.prompt_token_ids + (samples[0].generated_token_ids if samples else ()),
            excluded=self.excluded if alongside is None else self.excluded | {alongside.incarnation},
            cache_salt=request.options.cache_salt,
            avoided=self.failures.avoided,
            numerics="" if alongside is None else alongside.numerics,
            is_scored=self.answer.needs_prompt_logprobs,
            num_samples=max(len(samples), 1),
        )
