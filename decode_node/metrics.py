"""The decode node's metrics, collected at step boundaries and from parts that keep their own totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import chain

from prometheus_client import REGISTRY, CollectorRegistry

from decode_node.commands import EventsBySession
from decode_node.drafting.client import DraftClientStatus
from decode_node.groups import PrefixLookups
from decode_node.step import StepStats
from outrider.drafting.book import DraftCounters
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.runner_base import RankLoad
from outrider.node import NodeLoad
from outrider.service.telemetry.metrics import EngineMetrics
from outrider.service.telemetry.recent_sum import RecentSum
from outrider.session import Granted, KvReady, SampleTokens, SpeculationCounts

REFUSED = {
    "stale": "frames_stale",
    "corrupt": "frames_corrupt",
    "out_of_bounds": "frames_out_of_bounds",
    "conflicting": "frames_conflicting",
    "failed": "frames_failed",
    "malformed": "messages_malformed",
}
"""For each reason under which dropped frames are exported, the name of the receiver's counter."""


class RecentRates:
    """The rates that the node reports, each over the last ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens, self.kv_bytes = RecentSum(clock), RecentSum(clock)
        self._drafts, self._accepted = RecentSum(clock), RecentSum(clock)
        self._requested_steps, self._hit_steps = RecentSum(clock), RecentSum(clock)

    def add_speculation(self, counts: SpeculationCounts) -> None:
        self._drafts.add(counts.num_spec_steps)
        self._accepted.add(counts.num_accepted_draft_tokens)
        self._requested_steps.add(counts.num_wanting_steps)
        self._hit_steps.add(counts.num_hit_steps)

    def mean_acceptance_length(self) -> float:
        """Returns 1 + accepted draft tokens per draft, or 0 if nothing was drafted."""
        num_drafts = self._drafts.total()
        return 1.0 + self._accepted.total() / num_drafts if num_drafts else 0.0

    def look_ahead_hit_rate(self) -> float:
        """Returns the share of steps with a draft node's proposal among those that requested it; 0 without requests."""
        num_requested = self._requested_steps.total()
        return self._hit_steps.total() / num_requested if num_requested else 0.0


class DecodeMetrics:
    """The node's Prometheus metrics. Event loop only."""

    def __init__(self, model_name: str, *, pool: BlockPool, registry: CollectorRegistry = REGISTRY) -> None:
        self._engine = EngineMetrics(model_name=model_name, registry=registry)
        self._engine.show_cache(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            has_prefix_cache=pool.enable_prefix_cache,
            host=pool.host,
        )
        self.recent = RecentRates()
        self._received: Counter[str] = Counter()
        self._prefix_lookups = PrefixLookups()
        self._drafts = DraftCounters()

    def observe(self, events: EventsBySession, stats: StepStats | None) -> None:
        """Records the events and the statistics of one iteration of the engine thread."""
        speculation: list[SpeculationCounts] = []
        for event in chain.from_iterable(events.values()):
            match event:
                case SampleTokens() as tokens:
                    speculation.append(tokens.speculation)
                case Granted() as granted:
                    self._engine.add_tokens(num_prompt_tokens=granted.num_tokens_to_compute)
                case KvReady() as ready:
                    self._engine.observe_transfer(
                        connector=ready.connector, num_bytes=ready.kv_bytes, seconds=ready.transfer_seconds
                    )
                    self.recent.kv_bytes.add(ready.kv_bytes)
                case _:
                    continue
        if speculation:  # summed first, since each update of a counter takes a lock
            counts = SpeculationCounts.total(speculation)
            self._engine.add_speculation(counts)
            self.recent.add_speculation(counts)
        if stats is not None:
            self.recent.tokens.add(stats.num_generated_tokens)
            self._engine.observe_step(seconds=stats.seconds, num_rows=stats.num_rows)
            self._engine.add_step_parts(stats.nanoseconds)
            self._engine.add_tokens(num_generated_tokens=stats.num_generated_tokens)
            self._engine.add_preemptions(len(stats.preempted_groups))
            self._engine.add_verified_drafts(
                stats.num_drafts_by_method,
                num_tokens_by_source=stats.num_draft_tokens_by_source,
                num_accepted_by_source=stats.num_accepted_by_source,
            )

    def sync(
        self,
        *,
        load: NodeLoad,
        received: Counter[str],
        drafts: DraftClientStatus,
        prefix_lookups: PrefixLookups,
        ranks: RankLoad | None,
    ) -> None:
        """Updates gauges, and counters from the totals that other parts keep. Called periodically."""
        self._engine.set_load(load)
        if ranks is not None:
            self._engine.set_ranks(**ranks._asdict())
        for reason, name in REFUSED.items():
            if num_new := received[name] - self._received[name]:
                self._engine.add_dropped_frames(reason, num_new)
        self._received = received
        self._engine.add_prefix_lookup(
            num_query_tokens=prefix_lookups.num_query_tokens - self._prefix_lookups.num_query_tokens,
            num_hit_tokens=prefix_lookups.num_hit_tokens - self._prefix_lookups.num_hit_tokens,
        )
        self._prefix_lookups = prefix_lookups
        self._engine.set_breakers(drafts.is_late)
        now, before = drafts.counters, self._drafts
        self._engine.add_refused_proposals("quarantined", now.num_quarantined - before.num_quarantined)
        self._engine.add_refused_proposals("stale", now.num_stale_answers - before.num_stale_answers)
        self._engine.add_look_ahead(lead_seconds=now.lead_seconds - before.lead_seconds)
        self._drafts = now
