"""What a step has to tell once it is committed: tokens for routers, blocks for the prefix cache, counts for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from decode_node.groups import Sample, SequenceGroup
from decode_node.statistics import StepSpeedup, StepStats
from decode_node.step_drafts import StepDrafts
from decode_node.verdict import Verdict
from outrider.engine.scheduler import StepPlan
from outrider.profile import StepKind
from outrider.session import SampleDone, SampleTokens, SequenceGroupEvent
from outrider.speculation.draft_controller import StepForecast
from outrider.speculation.verify.base import DraftRows


@dataclass(frozen=True, slots=True)
class StepReport:
    """Verdicts that are committed and that nobody has heard of. Made into events before the next step commits."""

    samples: Sequence[Sample]
    verdicts: Sequence[Verdict]  # of each sample
    drafts: StepDrafts
    stats: StepStats

    def events(self) -> Iterator[tuple[SequenceGroup, SequenceGroupEvent]]:
        """In the order of the batch, each sample's tokens before its end."""
        wanting, hits = self.drafts.wanting, self.drafts.hits
        for sample, verdict in zip(self.samples, self.verdicts, strict=True):
            sequence, group, token_ids = sample.sequence, sample.group, verdict.token_ids
            group_id = group.opened.sequence_group_id
            yield (
                group,
                SampleTokens(
                    group_id,
                    sample.index,
                    len(sequence.token_ids) - len(token_ids),
                    token_ids,
                    verdict.logprobs,
                    verdict.counts(wanting=sequence.key in wanting, hit=sequence.key in hits),
                ),
            )
            if verdict.finish_reason is not None:
                yield (
                    group,
                    SampleDone(
                        sequence_group_id=group_id,
                        sample=sample.index,
                        reason=verdict.finish_reason,
                        stop_token_id=verdict.stop_token_id,
                    ),
                )

    def publish_blocks(self) -> None:
        """Of samples that go on; those that ended, or were preempted since, have published theirs."""
        for sample in self.samples:
            sequence = sample.sequence
            if sequence.kv is not None:
                sequence.kv.publish(sequence.token_ids)


def step_kind(plan: StepPlan) -> StepKind:
    if any(item.num_rows > 1 for item in plan.scheduled):
        return StepKind.PROMPT
    return StepKind.VERIFY if any(item.num_draft_tokens for item in plan.scheduled) else StepKind.DECODE


def step_stats(
    plan: StepPlan,
    drafts: Sequence[DraftRows],
    verdicts: Sequence[Verdict],
    forecast: StepForecast | None,
    *,
    num_rows: int,
    seconds: float,
    nanoseconds: Mapping[str, int],
) -> StepStats:
    num_tokens = sum([len(verdict.token_ids) for verdict in verdicts])
    return StepStats(
        seconds=seconds,
        nanoseconds=nanoseconds,
        num_rows=num_rows,
        num_sequences=len(plan.scheduled),
        num_preempted=len(plan.preempted),
        num_generated_tokens=num_tokens,
        num_drafts=sum([verdict.num_draft_tokens > 0 for verdict in verdicts]),
        num_draft_tokens=sum([verdict.num_draft_tokens for verdict in verdicts]),
        num_accepted_draft_tokens=sum([verdict.num_accepted for verdict in verdicts]),
        speedup=None if forecast is None else StepSpeedup.of(forecast, num_tokens=num_tokens, seconds=seconds),
        num_drafts_by_method=Counter([draft.method for draft in drafts if draft.rows.draft_token_ids]),
    )
