"""The states of a request and of its attempts, and what both machines use."""

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
    """Where a request is in its life."""

    ENCODING = enum.auto()  # its text becomes token ids, its constraint is compiled
    QUEUED = enum.auto()  # no attempt runs; it may have tokens already
    SERVING = enum.auto()  # one or two attempts run
    CONCLUDING = enum.auto()  # all samples have ended; statistics may still come
    ENDED = enum.auto()  # the answer is complete or has failed, and can be read until its window ends
    CLOSED = enum.auto()  # nothing is held anywhere, and the name is free


class AttemptState(enum.Enum):
    """Where an attempt is. One that is over is forgotten, and its late events are dropped."""

    OPENING = enum.auto()  # the decode node was asked for a reservation
    TRANSFERRING = enum.auto()  # a prefill node computes and pushes KV
    RETARGETING = enum.auto()  # the decode node was told of another transfer
    DECODING = enum.auto()  # tokens come
    COMPLETED = enum.auto()  # its samples have ended; its prefill call has not


class InvalidTransitionError(InternalError):
    """An event came in a state that does not know it."""

    def __init__(self, state: enum.Enum, event: object) -> None:
        super().__init__(f"{type(event).__name__} is unknown in state {state.name}")


class Cluster(Protocol):
    """What a request asks about nodes. Asking changes nothing."""

    def is_usable(self, demand: Demand) -> bool:
        """Whether a decode node serves that could take the request once it has room."""

    @property
    def may_know_more(self) -> bool:
        """Whether a decode node that does not serve now may take what those that serve cannot."""

    def has_timely_decode_node(self, demand: Demand) -> bool:
        """Whether a decode node that is on time could take the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a request waits for what, in seconds, and where its ids come from."""

    window_seconds: float | None  # how long the answer can be resumed; None: it ends with its only stream
    open_timeout_seconds: float  # for a decode node to grant or to refuse
    kv_ready_timeout_seconds: float  # from the end of a prefill call to complete KV
    new_id: Callable[[], bytes]  # of sequence groups and transfers


@dataclass(slots=True)
class Shared:
    """What a request and its attempts share."""

    limits: Limits
    failures: FailureBudget = field(default_factory=FailureBudget)
    maybe_answer: Answer | None = None  # None: the request is being encoded
    excluded: frozenset[bytes] = frozenset()  # processes of decode nodes that the request can never fit on
    was_admitted: bool = False  # a decode node has granted it room, here or for a router that is gone
    now: float = 0.0  # monotonic seconds, of the step under way
    out: list[do.Instruction] = field(default_factory=list)  # what the step under way wants done

    @property
    def answer(self) -> Answer:
        assert self.maybe_answer is not None, "the request has been encoded"
        return self.maybe_answer

    def demand(self, alongside: Node | None = None) -> Demand:
        """Returns the demand for the first unfinished sample's tokens: the KV of the others begins alike.

        `alongside`: the decode node of an attempt that goes on, so that the other one must compute the same tokens
        elsewhere.
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
