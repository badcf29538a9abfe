"""What all requests share, what all attempts at one request share, how one can end, and how many may be lost."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import LOSES_NODES, OutriderError, PeerLostError
from outrider.rpc.status import UNREACHABLE
from outrider.service.telemetry.metrics import RouterMetrics
from outrider.session import Rejected, RejectReason
from router.answer import Answer
from router.answer_budget import AnswerAccount, AnswerBudget
from router.config import RouterConfig
from router.node_directory import ServedModel
from router.node_link import NodeLink
from router.placement import Placement
from router.receipts.keeper import ReceiptKeeper
from router.request_figures import RequestFigures
from router.request_queue import RequestQueue
from router.timeline import Timelines

MAX_LOSSES = 3
"""Nodes that may lose a request without a new token, over all attempts and both roles. Then it fails."""
MAX_TRANSFERS = 3
"""KV transfers that may fail without a new token; then the decode node computes the prompt itself."""
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


class Losses:
    """What one request has lost since its last new token: a request that kills nodes must not kill them all."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_tokens = 0  # that the answer had at the last loss
        self._num_losses = 0
        self._num_transfers = 0  # that failed
        self.avoided: set[bytes] = set()  # incarnations of the nodes, for good

    def add_node(self, incarnation: bytes) -> None:
        """A node ended, or gave the request up."""
        self._forget_earlier()
        self._num_losses += 1
        self.avoided.add(incarnation)

    def add_transfer(self, incarnation: bytes) -> None:
        """A transfer from this prefill node failed."""
        self._forget_earlier()
        self._num_transfers += 1
        self.avoided.add(incarnation)

    @property
    def may_transfer(self) -> bool:
        return self._num_transfers < MAX_TRANSFERS

    def may_open_beside_one(self) -> bool:
        """Whether an attempt may begin beside one that runs: both might be lost."""
        self._forget_earlier()
        return self._num_losses + 2 <= MAX_LOSSES

    def final_error(self, last: PeerLostError) -> PeerLostError | None:
        """What the request ends with after too many losses; None: it goes on."""
        if self._num_losses < MAX_LOSSES:
            return None
        message = f"{self._num_losses} nodes were lost without a new token; the last: {last.message}"
        return PeerLostError(message, node=last.node, reason=LOSES_NODES)

    def _forget_earlier(self) -> None:
        num_tokens = self._answer.num_generated_tokens
        if num_tokens > self._num_tokens:
            self._num_tokens, self._num_losses, self._num_transfers = num_tokens, 0, 0


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
    receipts: ReceiptKeeper | None  # None: `router.receipts` is empty


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
        """The node lost this request, which may be the cause itself."""
        link.breaker.fail(None if cause in NODE_CAUSES else self.figures.timeline.serial)

    def note_move(self, link: NodeLink, cause: str, error: PeerLostError | None = None) -> None:
        num_tokens = self.answer.num_generated_tokens
        self.figures.add_move(cause, node=link.name, error=error, num_generated_tokens=num_tokens)
