"""Computes figures from records of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, quantiles

from outrider.bench.load import Level, Pass, RequestRecord
from outrider.bench.machine import CpuReading, others_cpu_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of durations in seconds, linearly interpolated between neighbours."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Returns the percentiles, or None if there are no values."""
        if not values:
            return None
        hundredths = quantiles(values if len(values) > 1 else [*values] * 2, n=100, method="inclusive")
        return cls(p50=hundredths[49], p90=hundredths[89], p99=hundredths[98])


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFigures:
    """Figures of one level in one mode (with or without speculation)."""

    level: str
    speculation: bool
    num_requests: int
    errors: Mapping[str, int]  # by reason
    error_messages: Mapping[str, str]  # by reason: the first message
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    wall_seconds: float
    requests_per_second: float  # answers without error, divided by the wall time
    tokens_per_second: float  # generated tokens of all answers, divided by the wall time
    stream_tokens_per_second: float  # median over answers, from the first delta to the last
    ttft_seconds: Percentiles | None  # from sending the request to the first tokens
    itl_seconds: Percentiles | None  # between consecutive deltas of an answer
    e2e_seconds: Percentiles | None
    acceptance_rate: float  # accepted / drafted
    mean_acceptance_length: float  # 1 + accepted / verifications with drafts
    look_ahead_hit_rate: float
    kv_bytes: int
    kv_connectors: tuple[str, ...]
    others_cpu_share: float | None  # None: the cluster's processes are unknown


def figures_of(
    level: Level, passes: Sequence[Pass], *, speculation: bool, cpu: Sequence[CpuReading] = ()
) -> LevelFigures:
    """Computes figures of one level over all its passes. `cpu` has a reading per pass, if known."""
    records = [record for one in passes for record in one.records]
    answered = [record for record in records if not record.error]
    wall_seconds = sum(one.wall_seconds for one in passes)
    num_generated = sum(record.num_tokens for record in answered)
    speculations = [record.metrics.speculation for record in answered]
    num_draft = sum(one.num_draft_tokens for one in speculations)
    num_accepted = sum(one.num_accepted_draft_tokens for one in speculations)
    num_spec_steps = sum(one.num_spec_steps for one in speculations)
    hit_rates = [one.look_ahead_hit_rate for one in speculations if one.num_draft_tokens]
    rates = [rate for record in answered if (rate := stream_rate(record)) is not None]
    return LevelFigures(
        level=level.name,
        speculation=speculation,
        num_requests=len(records),
        errors=dict(Counter(record.error for record in records if record.error)),
        error_messages={record.error: record.error_message for record in reversed(records) if record.error},
        num_generated_tokens=num_generated,
        num_prompt_tokens=sum(record.usage.num_prompt_tokens for record in answered),
        num_cached_tokens=sum(record.usage.num_cached_tokens for record in answered),
        wall_seconds=wall_seconds,
        requests_per_second=len(answered) / wall_seconds if wall_seconds else 0.0,
        tokens_per_second=num_generated / wall_seconds if wall_seconds else 0.0,
        stream_tokens_per_second=median(rates) if rates else 0.0,
        ttft_seconds=Percentiles.of([r.token_times[0][0] - r.sent_at for r in answered if r.token_times]),
        itl_seconds=Percentiles.of([gap for record in answered for gap in gaps(record)]),
        e2e_seconds=Percentiles.of([record.finished_at - record.sent_at for record in answered]),
        acceptance_rate=num_accepted / num_draft if num_draft else 0.0,
        mean_acceptance_length=1 + num_accepted / num_spec_steps if num_spec_steps else 0.0,
        look_ahead_hit_rate=mean(hit_rates) if hit_rates else 0.0,
        kv_bytes=sum(record.metrics.kv_transfer.bytes for record in answered),
        kv_connectors=tuple(sorted({record.metrics.kv_transfer.connector for record in answered} - {""})),
        others_cpu_share=others_cpu_share(cpu) if cpu else None,
    )


def stream_rate(record: RequestRecord) -> float | None:
    """Returns tokens per second after the first delta; None for an answer of one delta."""
    if len(record.token_times) < 2:
        return None
    (first_at, first_count), (last_at, _) = record.token_times[0], record.token_times[-1]
    return (record.num_tokens - first_count) / max(last_at - first_at, 1e-9)


def gaps(record: RequestRecord) -> list[float]:
    """Returns seconds between consecutive deltas."""
    times = [at for at, _ in record.token_times]
    return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Speculation relative to plain decoding at one level: medians over the pairs of interleaved passes."""

    level: str
    num_pairs: int
    tokens_per_second_ratio: float  # above 1: speculation is faster
    stream_tokens_per_second_ratio: float
    ttft_ratio: float  # below 1: speculation is faster
    num_identical_answers: int
    num_compared_answers: int  # 0 if the modes had different prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    figures: tuple[LevelFigures, ...]
    comparisons: tuple[Comparison, ...]  # one per level if both modes ran


def compare(
    level: Level, plain: Sequence[Pass], speculative: Sequence[Pass], *, are_answers_comparable: bool
) -> Comparison:
    """Compares passes: `plain[i]` and `speculative[i]` ran consecutively, with equal prompts except for their marks."""
    pairs = [
        (figures_of(level, [a], speculation=False), figures_of(level, [b], speculation=True))
        for a, b in zip(plain, speculative, strict=True)
    ]
    answers = [
        (a.token_ids, b.token_ids)
        for one, other in zip(plain, speculative, strict=True)
        for a, b in zip(one.records, other.records, strict=True)
        if are_answers_comparable and not a.error and not b.error
    ]
    return Comparison(
        level=level.name,
        num_pairs=len(pairs),
        tokens_per_second_ratio=_median_ratio((b.tokens_per_second, a.tokens_per_second) for a, b in pairs),
        stream_tokens_per_second_ratio=_median_ratio(
            (b.stream_tokens_per_second, a.stream_tokens_per_second) for a, b in pairs
        ),
        ttft_ratio=_median_ratio(
            (b.ttft_seconds.p50, a.ttft_seconds.p50) for a, b in pairs if a.ttft_seconds and b.ttft_seconds
        ),
        num_identical_answers=sum(a == b for a, b in answers),
        num_compared_answers=len(answers),
    )


def _median_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    ratios = [above / below for above, below in pairs if below > 0]
    return median(ratios) if ratios else 0.0
