"""The values of a step: what is planned for each sequence, what is decided for it, and what is reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from decode_node.groups import Sample, SequenceGroup
from outrider.drafting.book import StepDrafts
from outrider.engine.arrays import Array
from outrider.engine.input_batch import SequenceRows
from outrider.engine.sampler import SampleRows
from outrider.engine.scheduler import Scheduled, StepPlan
from outrider.profile import StepKind
from outrider.request import FinishReason, TokenLogprobs, VerificationMethod
from outrider.session import SampleDone, SampleTokens, SequenceGroupEvent, SpeculationCounts
from outrider.speculation.draft_tree import DraftTree, RankedDraft
from outrider.speculation.verify.base import DraftRows, Verified

NO_DRAFT = DraftTree(0)


class PlannedSequence(NamedTuple):
    """A scheduled sequence, its sample, and the draft that is verified."""

    scheduled: Scheduled
    sample: Sample
    draft: DraftTree  # in the order of its rows

    @classmethod
    def of(cls, scheduled: Scheduled, sample: Sample, draft: RankedDraft | None) -> PlannedSequence:
        """Returns the planned sequence with its draft cut to the granted rows and in depth-first order."""
        if draft is None or not scheduled.num_draft_tokens:
            return cls(scheduled, sample, NO_DRAFT)
        return cls(scheduled, sample, draft.tree.cut(scheduled.num_draft_tokens).depth_first())

    def rows(self) -> SequenceRows:
        """Returns the rows of the forward pass: known tokens without KV, then the draft tokens."""
        sequence, draft, num_rows = self.scheduled.sequence, self.draft, self.scheduled.num_rows
        kv, known = sequence.kv, sequence.token_ids
        assert kv is not None
        start = kv.num_tokens
        return SequenceRows(
            (*known[start : start + num_rows], *draft.token_ids) if num_rows > 1 else (known[start], *draft.token_ids),
            start,
            kv.block_table(),
            1 + len(draft.token_ids) if self.scheduled.reaches_end else len(self.scheduled.scored_token_ids),
            draft.parents,
            sequence.adapter,
            kv.window_tables(),
            None if kv.state is None else kv.plan_states(num_rows),
        )

    def draft_rows(self) -> DraftRows:
        """Returns rows for the verifier, which decides the token after the known ones and after each draft token."""
        sample, draft = self.sample, self.draft
        rows = SampleRows(sample.sampling, len(sample.sequence.token_ids), draft.token_ids)
        return DraftRows(rows, draft.distributions, sample.group.opened.options.verification_method, draft.parents)

    def moved_slots(self, outcome: Verified) -> Iterator[tuple[int, int]]:
        """Yields (source, destination) slots for a tree's accepted tokens whose KV is not in their position's slot, in
        every group of layers.
        """
        kv = self.scheduled.sequence.kv
        assert kv is not None
        first = len(self.scheduled.sequence.token_ids)
        for place, index in enumerate(outcome.path):
            if index != place:
                yield from zip(kv.slots_of_groups(first + index), kv.slots_of_groups(first + place), strict=True)


class LaunchedStep(NamedTuple):
    """A step whose forward pass has begun."""

    plan: StepPlan
    planned: Sequence[PlannedSequence]
    logits: Array  # as Engine.forward returns them
    launched_at: float  # when the forward pass was queued, in seconds of a monotonic clock
    drafts: StepDrafts
    preempted: Sequence[Sample] = ()
    is_ahead: bool = False  # whether the forward pass was queued before the previous step was committed


class Verdict(NamedTuple):
    """The tokens that a step commits for one sample, in order, and why the sample ends with them, if it does."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty, or one for each token
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_draft_tokens: int
    num_accepted: int  # accepted draft tokens, including those after a stop
    rejected_token_ids: tuple[int, ...] = ()  # the other draft tokens, in the order of their rows


def apply_stop_conditions(
    verified: Verified, draft: DraftTree, *, stop_token_ids: frozenset[int], num_tokens_left: int
) -> Verdict:
    """Returns the verified tokens up to the first one that ends the sample.

    If that token is a stop token and also the last one allowed, the reason is STOP. `num_tokens_left`: the number of
    tokens left of max_tokens, at least 1.
    """
    token_ids, num_draft_tokens = verified.token_ids, len(draft.token_ids)
    num_accepted = len(token_ids) - 1
    rejected = _rejected(draft, verified) if num_accepted < num_draft_tokens else ()
    if len(token_ids) < num_tokens_left and stop_token_ids.isdisjoint(token_ids):
        return Verdict(token_ids, _requested(verified.logprobs), None, None, num_draft_tokens, num_accepted, rejected)
    token_ids = token_ids[:num_tokens_left]
    reason = FinishReason.LENGTH if len(token_ids) == num_tokens_left else None
    stop_token_id = None
    if not stop_token_ids.isdisjoint(token_ids):
        end = next(index for index, token_id in enumerate(token_ids) if token_id in stop_token_ids)
        token_ids, reason, stop_token_id = token_ids[: end + 1], FinishReason.STOP, token_ids[end]
    logprobs = _requested(verified.logprobs[: len(token_ids)])
    return Verdict(token_ids, logprobs, reason, stop_token_id, num_draft_tokens, num_accepted, rejected)


def _rejected(draft: DraftTree, verified: Verified) -> tuple[int, ...]:
    if not draft.parents:
        return draft.token_ids[verified.num_accepted :]
    return tuple([token_id for index, token_id in enumerate(draft.token_ids) if index not in verified.path])


def _requested(logprobs: tuple[TokenLogprobs | None, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([value for value in logprobs if value is not None]) if logprobs else ()


@lru_cache(maxsize=4096)
def speculation_counts(num_draft_tokens: int, num_accepted: int, requested: bool, hit: bool) -> SpeculationCounts:  # noqa: FBT001 of one caller
    """Returns what a verdict adds to its request's counts. Equal verdicts share one value."""
    drafted = num_draft_tokens > 0
    return SpeculationCounts(
        num_spec_steps=int(drafted),
        num_draft_tokens=num_draft_tokens,
        num_accepted_draft_tokens=num_accepted,
        acceptance_histogram=(0,) * num_accepted + (1,) if drafted else (),
        num_wanting_steps=int(requested),
        num_hit_steps=int(hit),
    )


class StepStats(NamedTuple):
    """The statistics of a step, which the engine thread passes to the event loop for its metrics."""

    seconds: float
    nanoseconds: Mapping[str, int]  # by outrider.profile.Part, since the end of the previous step
    num_rows: int
    num_generated_tokens: int
    preempted_groups: Sequence[tuple[int, bytes]]  # session and sequence group of each preempted sequence
    num_drafts_by_method: Mapping[VerificationMethod, int]  # verified drafts
    num_draft_tokens_by_source: Mapping[str, int]
    num_accepted_by_source: Mapping[str, int]


def step_kind(plan: StepPlan) -> StepKind:
    if any(item.num_rows > 1 for item in plan.scheduled):
        return StepKind.PROMPT
    return StepKind.VERIFY if any(item.num_draft_tokens for item in plan.scheduled) else StepKind.DECODE


class StepReport(NamedTuple):
    """The committed verdicts of a step that are not reported yet. They are reported before the next step commits."""

    step: LaunchedStep
    verifying: Sequence[PlannedSequence]  # the step's sequences whose next token was decided
    verdicts: Sequence[Verdict]  # one for each of `verifying`
    seconds: float
    nanoseconds: Mapping[str, int]  # see StepStats

    def events(self) -> Iterator[tuple[SequenceGroup, SequenceGroupEvent]]:
        """Yields events in the order of the batch, each sample's tokens before its end."""
        requested, hits = self.step.drafts.requested, self.step.drafts.hits
        for (_, sample, _), verdict in zip(self.verifying, self.verdicts, strict=True):
            if sample.sampling.failure:  # the tokens do not satisfy the sample's constraint
                continue
            sequence, group, token_ids = sample.sequence, sample.group, verdict.token_ids
            group_id = group.opened.sequence_group_id
            counts = speculation_counts(
                verdict.num_draft_tokens, verdict.num_accepted, sequence.key in requested, sequence.key in hits
            )
            first = len(sequence.token_ids) - len(token_ids)
            yield (
                group,
                SampleTokens(
                    group_id, sample.index, first, token_ids, verdict.logprobs, counts, verdict.rejected_token_ids
                ),
            )
            if verdict.finish_reason is not None:
                done = SampleDone(
                    sequence_group_id=group_id,
                    sample=sample.index,
                    reason=verdict.finish_reason,
                    stop_token_id=verdict.stop_token_id,
                )
                yield group, done

    def publish_blocks(self) -> None:
        """Publishes the full blocks of running samples. Ended and preempted samples have published theirs."""
        for _, sample, _ in self.verifying:
            kv = sample.sequence.kv
            if kv is not None and kv.has_unpublished_blocks:
                kv.publish(sample.sequence.token_ids)

    def stats(self) -> StepStats:
        """Returns the statistics. They are counted here, not in the commit, since by now the device is busy again."""
        num_tokens, num_accepted = defaultdict[str, int](int), defaultdict[str, int](int)
        num_by_method = defaultdict[VerificationMethod, int](int)
        for item, verdict in zip(self.verifying, self.verdicts, strict=True):
            if verdict.num_draft_tokens:
                num_tokens[item.draft.source] += verdict.num_draft_tokens
                num_accepted[item.draft.source] += verdict.num_accepted
                num_by_method[item.sample.group.opened.options.verification_method] += 1
        preempted = [each.group for each in self.step.preempted]
        return StepStats(
            seconds=self.seconds,
            nanoseconds=self.nanoseconds,
            num_rows=self.step.plan.num_rows,
            preempted_groups=[(group.session_id, group.opened.sequence_group_id) for group in preempted],
            num_generated_tokens=sum([len(verdict.token_ids) for verdict in self.verdicts]),
            num_drafts_by_method=num_by_method,
            num_draft_tokens_by_source=num_tokens,
            num_accepted_by_source=num_accepted,
        )
