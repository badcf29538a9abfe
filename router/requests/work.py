"""What all requests share, what all attempts at one request share, and how an attempt can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.errors import OutriderError, PeerLostError
from outrider.node import ModelInfo
from outrider.rpc.status import UNREACHABLE
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Rejected, RejectReason
from outrider.v1 import router_pb2
from router.config import RouterConfig
from router.nodes.directory import ServedModel
from router.nodes.link import NodeLink
from router.observe.request_figures import RequestFigures
from router.observe.timelines import Timelines
from router.requests.answer import Answer
from router.requests.answer_budget import AnswerAccount, AnswerBudget
from router.requests.losses import Losses
from router.scheduling.placement import Placement
from router.scheduling.request_queue import RequestQueue

NODE_CAUSES = frozenset({"decode_lost", "decode_silent", "token_mismatch", "protocol", UNREACHABLE})
"""Of losses for which a node is to blame; others the request may have caused itself, and the node goes on."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Every sample that was opened has ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode node keeps nothing of it."""

    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Lost:
    """The work is gone, or must not go on where it was; what the answer has is kept."""

    error: PeerLostError
    cause: str  # one word, for metrics
    is_counted: bool = True  # False: planned, or counted before


@dataclass(frozen=True, slots=True)
class Fatal:
    """No other node would do better."""

    error: OutriderError


Outcome = Completed | Refused | Lost | Fatal


def describe(outcome: Outcome | None) -> str:
    """For people; empty for an attempt that has done its work."""
    match outcome:
        case Completed():
            return ""
        case Refused(Rejected(reason=RejectReason.INVALID as reason)):
            return reason.name  # its message may quote the request
        case Refused(rejected):
            return f"{rejected.reason.name}: {rejected.message}"
        case Lost(error, cause):
            return f"{cause}: {error.message}"
        case Fatal(error):
            return error.reason  # its message is the request's
        case None:
            return "given up"


class OutcomeError(Exception):
    """Ends an attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class ReceiptQueue(Protocol):
    """Where receipts of ended requests go (`router.durability.receipts.keeper.ReceiptKeeper`)."""

    def keep(
        self, proto: router_pb2.GenerateRequest, answer: Answer, figures: RequestFigures, model: ModelInfo
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every request of a router uses. Made once a node serves, by `router.router.Router`."""

    config: RouterConfig
    queue: RequestQueue
    placement: Placement
    answers: AnswerBudget
    metrics: RouterMetrics
    timelines: Timelines
    router_address: str
    receipts: ReceiptQueue | None  # None: `router.receipts` is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all attempts at one request share."""

    answer: Answer
    figures: RequestFigures
    account: AnswerAccount
    losses: Losses
    served: ServedModel
    services: Services

    def blame(self, link: NodeLink, cause: str) -> None:
        """The node lost this request: others are kept away from it, unless the request is seen to be the cause."""
        if cause in NODE_CAUSES:
            link.breaker.fail()
        else:
            self.losses.blame(link.breaker)

    def note_move(self, link: NodeLink, cause: str, error: PeerLostError | None = None) -> None:
        num_tokens = self.answer.num_generated_tokens
        self.figures.add_move(cause, node=link.name, error=error, num_generated_tokens=num_tokens)
