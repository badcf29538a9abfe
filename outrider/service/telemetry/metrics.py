"""Prometheus metrics. A metric that vLLM has as well uses vLLM's name and labels, so that vLLM's dashboards work.

The router counts requests, tokens and the times that clients see; nodes count what their
engines do. Metrics without a name in vLLM are `outrider:*`. Every series has the label
`model_name`. All methods are thread-safe and cheap enough to call once per step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.answer import Summary
from outrider.node import NodeLoad, NodeRole
from outrider.request import FinishReason, VerificationMethod
from outrider.service.telemetry.buckets import (
    ITL_BUCKETS,
    MOVE_GAP_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TOKENS_BUCKETS,
    TRANSFER_BUCKETS,
    TTFT_BUCKETS,
)
from outrider.service.telemetry.families import Family
from outrider.session import SpeculationCounts

MOVE_CAUSES = (
    *("decode_lost", "decode_silent", "decode_late", "draining", "group_failed", "prefill_lost", "protocol"),
    *("token_mismatch", "internal"),
)

MAX_ADAPTERS = 100
"""Maximum adapters with series of their own. Clients may load any number of them, one after another."""
OTHER_ADAPTERS = "other"

HOST_COUNTERS = {
    "num_saved": ("saved", "KV blocks saved to main memory when they were evicted."),
    "num_loaded": ("loaded", "KV blocks loaded from main memory instead of being computed."),
    "num_dropped": ("dropped", "KV blocks for which main memory had no room, or copying no time."),
    "num_refused": ("refused", "KV blocks not saved, because computing them is measured to be faster."),
}
"""For each figure of a HostStore, the end of its counter's name and its meaning."""

_FINISHED_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


class TokenTimes(Collector):
    """Counts tokens sent, and the times between them. `add` is called for every token of every stream and therefore
    takes no lock: only one thread adds, and a scrape in another thread may see a token but not its time yet.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_tokens = 0
        self._num_times = [0] * (len(ITL_BUCKETS) + 1)  # number of times in each bucket; the last has no upper bound
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds_since_last: float | None) -> None:
        """Adds tokens that arrived together. `seconds_since_last` is None for a sample's first tokens."""
        self._num_tokens += num_tokens
        if seconds_since_last is not None:
            seconds = seconds_since_last / num_tokens
            self._num_times[bisect_left(ITL_BUCKETS, seconds)] += 1
            self._seconds += seconds

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        labels = ("model_name",)
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens sent to clients.", labels=labels)
        tokens.add_metric((self._model_name,), self._num_tokens)
        times = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Between tokens of a sample.", labels=labels)
        bounds = (*map(floatToGoString, ITL_BUCKETS), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(self._num_times)), strict=True))
        times.add_metric((self._model_name,), buckets, sum_value=self._seconds)
        return tokens, times


class EngineMetrics:
    """Metrics of a node's engine. One instance per process and registry."""

    def __init__(self, *, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        family = Family(model_name, registry)
        family.count_lost_log_lines()
        self._running = family.gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self._waiting = family.gauge("vllm:num_requests_waiting", "Sequences that wait for the running batch.")
        self._kv_usage = family.gauge(
            "vllm:kv_cache_usage_perc", "Used share of KV blocks, 0 to 1; with expert parallelism, the emptiest rank's."
        )
        self._prompt_tokens = family.counter("vllm:prompt_tokens", "Prompt tokens computed or found in a cache.")
        self._generation_tokens = family.counter("vllm:generation_tokens", "Tokens generated.")
        self.add_preemptions = family.counter("vllm:num_preemptions", "Sequences preempted.").inc
        self._cache_queries = family.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = family.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._host: object | None = None  # a HostStore
        family.gauge("outrider:host_kv_bytes", "Main memory that evicted KV blocks use.").set_function(
            partial(self._host_figure, "num_bytes")
        )
        for figure, (ending, help_text) in HOST_COUNTERS.items():
            read = partial(self._host_figure, figure)
            family.follow(f"outrider:host_kv_blocks_{ending}", help_text, read)
        self._drafts = family.counter("vllm:spec_decode_num_drafts", "Verifications with draft tokens.")
        self._add_drafts_by_method = family.labelled_counter(
            "outrider:verified_drafts", "Verifications with draft tokens, by method; one is lossy.", "method"
        )
        self._draft_tokens = family.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = family.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._add_draft_tokens_of = family.labelled_counter(
            "outrider:source_draft_tokens", "Draft tokens verified, by who proposed them.", "source"
        )
        self._add_accepted_of = family.labelled_counter(
            "outrider:source_accepted_tokens", "Draft tokens accepted, by who proposed them.", "source"
        )
        self._add_accepted_at = family.labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
        )
        self._wanting = family.counter("outrider:draft_wanting_steps", "Steps that wanted a draft node's proposals.")
        self._hits = family.counter("outrider:draft_hit_steps", "Steps that found them waiting.")
        self._lead = family.counter("outrider:draft_lead_seconds", "How long proposals had waited when found.")
        self._ahead = family.counter("outrider:draft_ahead_tokens", "Draft tokens sent before they were asked for.")
        self._wasted = family.counter("outrider:draft_wasted_tokens", "Draft tokens made that were never committed.")
        self._steps = family.histogram("outrider:step_seconds", "One engine iteration.", STEP_BUCKETS)
        self._add_part = family.labelled_counter(
            "outrider:step_part_seconds", "What the engine's thread did with its time.", "part"
        )
        self._rows = family.counter("outrider:step_rows", "Rows in forward passes.")
        self._add_rank_rows = family.labelled_counter(
            "outrider:rank_rows", "Rows of each rank's sequences, if ranks divide them (expert parallelism).", "rank"
        )
        self._rank_rows = Counter[int]()  # shown so far, by rank
        self._expert_copies = family.gauge("outrider:expert_copies", "Experts of all layers with a second copy.")
        self._expert_balance = family.gauge(
            "outrider:expert_balance",
            "Recent rows of the busiest rank's experts by the mean of ranks, at least 1; 0: not measured.",
        )
        self._step_tokens = family.histogram(
            "vllm:iteration_tokens_total", "Rows in the forward passes of one iteration.", STEP_TOKENS_BUCKETS
        )
        self._model_name = model_name
        self._cache = Gauge(
            "vllm:cache_config_info",
            "The KV cache, in its labels; always 1.",
            ("model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=registry,
        )
        self._add_transfer_bytes = family.labelled_counter(
            "outrider:kv_transfer_bytes", "KV payload moved.", "connector"
        )
        self._transfers = family.histogram(
            "outrider:kv_transfer_seconds", "First frame to commit of one hand-off.", TRANSFER_BUCKETS
        )
        self._exposed = family.histogram(
            "outrider:kv_transfer_exposed_seconds", "Hand-off time that compute did not hide.", TRANSFER_BUCKETS
        )
        self.add_dropped_frames = family.labelled_counter("outrider:kv_frames_dropped", "Frames refused.", "reason")
        self.add_refused_proposals = family.labelled_counter(
            "outrider:proposals_refused", "Hostile or stale proposals.", "reason"
        )
        # `set_breakers` takes one value for each current draft node, by address.
        self.set_breakers = family.labelled_gauge(
            "outrider:draft_breaker_open", "1: the draft node is not waited for.", "target"
        )

    def set_load(self, load: NodeLoad) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        if load.kv_blocks_total:
            self._kv_usage.set(1.0 - load.kv_blocks_free / load.kv_blocks_total)

    def observe_step(self, *, seconds: float, num_rows: int) -> None:
        self._steps.observe(seconds)
        self._rows.inc(num_rows)
        self._step_tokens.observe(num_rows)

    def set_ranks(self, *, rows_by_rank: tuple[int, ...], num_expert_copies: int, expert_balance: float) -> None:
        """Shows how work is divided among ranks, see RankLoad."""
        for rank, num in enumerate(rows_by_rank):
            self._add_rank_rows(str(rank), num - self._rank_rows[rank])
            self._rank_rows[rank] = num
        self._expert_copies.set(num_expert_copies)
        self._expert_balance.set(expert_balance)

    def _host_figure(self, name: str) -> float:
        return float(getattr(self._host, name, 0))

    def show_cache(
        self, *, num_blocks: int, block_size: int, has_prefix_cache: bool, host: object | None = None
    ) -> None:
        """Sets the cache's static figures, once. `block_size` is in tokens; "gpu" in vLLM's name means any device.

        `host`: the HostStore, whose figures are read at each scrape, in another thread; None: there is none.
        """
        self._host = host
        self._cache.labels(self._model_name, str(block_size), str(num_blocks), str(has_prefix_cache)).set(1)

    def add_step_parts(self, nanoseconds: Mapping[str, int]) -> None:
        """Adds the time since the previous step, by part of the step."""
        for part, spent in nanoseconds.items():
            self._add_part(part, spent / 1e9)

    def add_tokens(self, *, num_prompt_tokens: int = 0, num_generated_tokens: int = 0) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_generated_tokens)

    def add_prefix_lookup(self, *, num_query_tokens: int, num_hit_tokens: int) -> None:
        self._cache_queries.inc(num_query_tokens)
        self._cache_hits.inc(num_hit_tokens)

    def add_speculation(self, counts: SpeculationCounts) -> None:
        self._drafts.inc(counts.num_spec_steps)
        self._draft_tokens.inc(counts.num_draft_tokens)
        self._accepted.inc(counts.num_accepted_draft_tokens)
        for position in range(len(counts.acceptance_histogram) - 1):
            reached = sum(counts.acceptance_histogram[position + 1 :])
            if reached:
                self._add_accepted_at(str(position), reached)
        self._wanting.inc(counts.num_wanting_steps)
        self._hits.inc(counts.num_hit_steps)

    def add_verified_drafts(
        self,
        num_drafts: Mapping[VerificationMethod, int],
        *,
        num_tokens_by_source: Mapping[str, int],
        num_accepted_by_source: Mapping[str, int],
    ) -> None:
        """Adds the drafts of one step. A source is "draft_node" or the name of a proposer in the decode node."""
        for method, number in num_drafts.items():
            self._add_drafts_by_method(method.label, number)
        for source, number in num_tokens_by_source.items():
            self._add_draft_tokens_of(source, number)
        for source, number in num_accepted_by_source.items():
            self._add_accepted_of(source, number)

    def add_look_ahead(self, *, num_tokens: int = 0, num_wasted_tokens: int = 0, lead_seconds: float = 0.0) -> None:
        """Adds look-ahead figures. Draft nodes know the numbers of tokens, decode nodes know `lead_seconds`."""
        self._ahead.inc(num_tokens)
        self._wasted.inc(num_wasted_tokens)
        self._lead.inc(lead_seconds)

    def observe_transfer(
        self, *, connector: str, num_bytes: int, seconds: float, exposed_seconds: float | None = None
    ) -> None:
        """Records one KV transfer. Only the prefill node knows `exposed_seconds`."""
        self._add_transfer_bytes(connector, num_bytes)
        self._transfers.observe(seconds)
        if exposed_seconds is not None:
            self._exposed.observe(exposed_seconds)


class PrefillMetrics(EngineMetrics):
    """Metrics of a prefill node's engine, including those for the autoscaling of prefill nodes."""

    def __init__(self, *, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name=model_name, registry=registry)
        family = Family(model_name, registry)
        # Callbacks give the values at each scrape, in another thread, because an idle node pushes no updates.
        self.follow_outstanding = family.gauge(
            "outrider:prefill_outstanding_tokens", "Prompt tokens that wait for or are in computation."
        ).set_function
        self.follow_saturation = family.gauge(
            "outrider:prefill_saturation",
            "Share of the last ten seconds in which prompt tokens waited for or were in computation, 0 to 1.",
        ).set_function


class RouterMetrics:
    """Metrics of what the router's clients see. One instance per process and registry."""

    def __init__(self, *, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._token_times = TokenTimes(model_name)
        registry.register(self._token_times)
        self.observe_tokens = self._token_times.add
        family = Family(model_name, registry)
        family.count_lost_log_lines()
        # Each scrape reads these gauges by callbacks, in another thread, since a wait grows without any event.
        self.follow_running = family.gauge("vllm:num_requests_running", "Requests that nodes work on.").set_function
        self.follow_waiting = family.gauge("vllm:num_requests_waiting", "Requests in the router's queue.").set_function
        self.follow_waiting_tokens = family.gauge(
            "outrider:waiting_prompt_tokens", "Prompt tokens of the requests in the router's queue."
        ).set_function
        self.follow_oldest_wait = family.gauge(
            "outrider:oldest_wait_seconds",
            "How long the request that has waited longest has been in the router's queue; 0: none waits.",
        ).set_function
        self._prompt_tokens = family.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.observe_first_token = family.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        ).observe
        times = (
            ("e2e_request_latency", "Arrival to last token."),
            ("request_queue_time", "Arrival to admission."),
            ("request_prefill_time", "Admission to first token."),
            ("request_decode_time", "First token to last token."),
            ("request_inference_time", "Admission to last token."),
        )
        self._e2e, self._queue, self._prefill, self._decode, self._inference = (
            family.histogram(f"vllm:{name}_seconds", help_text, REQUEST_BUCKETS) for name, help_text in times
        )
        counts = (
            ("request_prompt_tokens", "Prompt tokens of a request."),
            ("request_generation_tokens", "Generated tokens of a request, all its samples."),
            ("request_max_num_generation_tokens", "Generated tokens of a request's longest sample."),
        )
        self._request_prompt, self._request_generated, self._request_longest = (
            family.histogram(f"vllm:{name}", help_text, TOKENS_BUCKETS) for name, help_text in counts
        )
        self._add_finished = family.labelled_counter("vllm:request_success", "Samples finished.", "finished_reason")
        others = f"; all adapters after the first {MAX_ADAPTERS} share the label {OTHER_ADAPTERS}"
        self._add_of_adapter = [
            family.labelled_counter(f"outrider:adapter_{name}", f"{text} with an adapter{others}.", "adapter")
            for name, text in (
                ("requests", "Finished requests"),
                ("generation_tokens", "Generated tokens"),
                ("draft_tokens", "Verified draft tokens"),
                ("accepted_tokens", "Accepted draft tokens"),
            )
        ]
        self._adapters: set[str] = set()  # label values
        self.add_failures = family.labelled_counter(  # by OutriderErrors' reasons
            "outrider:request_failures",
            "Requests that were refused, that ended in an error, or whose clients had left (CLIENT_LEFT).",
            "reason",
        )
        self.add_lost_nodes = family.labelled_counter("outrider:nodes_lost", "Nodes that died or froze.", "role")
        self.add_mixed_numerics = family.counter(
            "outrider:mixed_numerics_requests", "Requests that moved between nodes of different numerics."
        ).inc
        self._add_moves = family.labelled_counter(
            "outrider:moves", "Times that a request's work moved to another node.", "cause"
        )
        self.add_hedge = family.counter(
            "outrider:hedges", "Requests computed in two places because a node was late."
        ).inc
        self._mismatches = family.counter(
            "outrider:token_mismatches", "Positions for which two nodes computed different tokens."
        )
        self.add_lost_receipts = family.counter(
            "outrider:receipts_lost", "Receipts of answers that could not be kept."
        ).inc
        self.observe_migration_gap = family.histogram(
            "outrider:move_gap_seconds", "Last token before a move to the first one after it.", MOVE_GAP_BUCKETS
        ).observe
        # Series are created at once, because rates would miss the first event of a series that begins with the value 1.
        for reason in _FINISHED_REASONS.values():
            self._add_finished(reason, 0)
        for cause in MOVE_CAUSES:
            self._add_moves(cause, 0)
        for role in NodeRole:
            self.add_lost_nodes(role.name.lower(), 0)
        self.num_moves = 0

    def observe_admitted(self, *, queue_seconds: float, num_prompt_tokens: int) -> None:
        self._queue.observe(queue_seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def observe_finished_request(self, summary: Summary, *, num_longest: int, adapter: str = "") -> None:
        """Records a finished request. `num_longest` is the number of generated tokens of its longest sample; `adapter`
        is the name of its adapter, if it has one.
        """
        usage, seconds, drafts = summary.usage, summary.metrics, summary.metrics.speculation
        if adapter:
            if len(self._adapters) >= MAX_ADAPTERS and adapter not in self._adapters:
                adapter = OTHER_ADAPTERS
            self._adapters.add(adapter)
            counts = (1, usage.num_generated_tokens, drafts.num_draft_tokens, drafts.num_accepted_draft_tokens)
            for add, number in zip(self._add_of_adapter, counts, strict=True):
                add(adapter, number)
        self._e2e.observe(seconds.e2e_seconds)
        self._request_prompt.observe(usage.num_prompt_tokens)
        self._request_generated.observe(usage.num_generated_tokens)
        self._request_longest.observe(num_longest)
        if usage.num_generated_tokens:  # an aborted request may have no tokens
            self._prefill.observe(max(seconds.ttft_seconds - seconds.queue_seconds, 0.0))
            self._decode.observe(max(seconds.e2e_seconds - seconds.ttft_seconds, 0.0))
            self._inference.observe(max(seconds.e2e_seconds - seconds.queue_seconds, 0.0))

    def observe_finished_sample(self, reason: FinishReason) -> None:
        self._add_finished(_FINISHED_REASONS[reason], 1)

    def add_move(self, cause: str) -> None:
        """Counts a migration. `cause` is one of `MOVE_CAUSES`."""
        self._add_moves(cause, 1)
        self.num_moves += 1
        if cause == "token_mismatch":
            self._mismatches.inc()
