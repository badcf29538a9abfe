"""What every request of a router uses."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.service.telemetry.metrics import RouterMetrics
from router.answer_budget import AnswerBudget
from router.config import RouterConfig
from router.hedge_budget import HedgeBudget
from router.node_link import PrefillLink
from router.placement import Placement
from router.receipts.keeper import ReceiptKeeper
from router.request_queue import RequestQueue
from router.timeline import Timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Made once a node serves, by `router.router.Router`."""

    config: RouterConfig
    queue: RequestQueue
    placement: Placement
    hedges: HedgeBudget
    answers: AnswerBudget
    metrics: RouterMetrics
    timelines: Timelines
    router_address: str
    receipts: ReceiptKeeper | None  # None: `router.receipts` is empty

    def may_replace(self, late: PrefillLink) -> bool:
        """Whether a late prefill node's work moves to another one; it is counted."""
        hedges = self.hedges
        may_move = late.is_late and self.placement.has_timely_prefill_node(besides=late) and hedges.may_move(late)
        if may_move:
            hedges.add_move(late)
        return may_move
