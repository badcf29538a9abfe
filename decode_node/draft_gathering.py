"""The drafts of one step: from a draft node where they are here, else from the local fallback, else none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode_node.drafts import DraftClient, DraftWant, NoDrafts
from decode_node.groups import Sample
from decode_node.step_drafts import StepDrafts
from decode_node.verdict import Verdict
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_policy import DraftPolicy
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest, Proposer

WAIT_SHARE_OF_STEP = 0.2

_log = get_logger("drafts")


def log_failed_fallback(error: Exception, sequence_ids: Sequence[int]) -> None:
    """The local proposer has failed: these sequences go on without drafts for a while."""
    _log.error("local proposer failed", num_sequences=len(sequence_ids), error=str(error), exc_info=error)


class DraftGatherer:
    """Joins policy (how many), draft client (from afar) and fallback (from here). Engine thread only.

    No step waits for the network past its budget: min(`max_wait_seconds`, 20 % of the
    last step).
    """

    def __init__(
        self,
        *,
        client: DraftClient | NoDrafts,
        fallback: Proposer | None,
        policy: DraftPolicy,
        num_speculative_tokens: int,
        max_wait_seconds: float,
    ) -> None:
        self._client = client
        self._fallback = fallback
        self._policy = policy
        self._num_speculative_tokens = num_speculative_tokens
        self._max_wait_seconds = max_wait_seconds
        self._last_step_seconds = 0.0

    def open(self, sample: Sample) -> None:
        """From here on the sequence is announced; a draft node warms its cache while the prompt is prefilled."""
        if self._maximum(sample) == 0:
            return
        opened = sample.group.opened
        self._client.open(
            sample.sequence_id,
            SequenceStart(
                params=opened.sampling,
                sample=sample.index,
                prompt_length=len(opened.prompt_token_ids),
                stop_token_ids=opened.stop_token_ids,
            ),
            sample.sequence.token_ids,
        )

    def close(self, sample: Sample) -> None:
        self._client.close(sample.sequence_id)
        self._policy.forget(sample.sequence_id)
        if self._fallback is not None:
            self._fallback.forget(sample.sequence_id)

    def gather(self, samples: Sequence[Sample], *, may_wait: bool = True) -> StepDrafts:
        """Drafts for the samples whose next row is a decode row. Waits within its budget only, or not at all."""
        wants: list[DraftWant] = []
        for sample in samples:
            num_wanted = self._num_wanted(sample)
            if num_wanted > 0:
                wants.append(DraftWant(sample.sequence_id, sample.sequence.token_ids, num_wanted))
        if not wants:
            return StepDrafts()
        wait_seconds = min(self._max_wait_seconds, WAIT_SHARE_OF_STEP * self._last_step_seconds) if may_wait else 0.0
        taken = self._client.take(wants, wait_seconds=wait_seconds)
        trees = dict(taken.trees)
        missing = [want for want in wants if not taken.of(want.sequence_id)]
        if missing and self._fallback is not None:
            requests = [ProposalRequest(want.sequence_id, want.token_ids, want.num_wanted) for want in missing]
            trees.update((proposal.sequence_id, proposal.tree) for proposal in self._fallback.propose(requests))
        return replace(taken, trees=trees, wanting=frozenset(want.sequence_id for want in wants))

    def observe_verdict(self, sample: Sample, verdict: Verdict) -> None:
        self._policy.observe_verdict(sample.sequence_id, verdict.num_draft_tokens, verdict.num_accepted)

    def observe_step(self, *, seconds: float, num_rows: int, num_sequences: int, num_prefill_rows: int) -> None:
        self._last_step_seconds = seconds
        self._policy.observe_step(seconds, num_rows, num_sequences, num_prefill_rows=num_prefill_rows)

    def announce(self, committed: Sequence[tuple[Sample, tuple[int, ...]]]) -> None:
        """Tells the draft nodes what was committed, and how much is wanted next."""
        updates = [
            (sample.sequence_id, token_ids, self._num_wanted(sample))
            for sample, token_ids in committed
            if self._maximum(sample) > 0
        ]
        if updates:
            self._client.update(updates)

    def _num_wanted(self, sample: Sample) -> int:
        """The step's last token needs no draft: a sample with one token left wants none."""
        maximum = min(self._maximum(sample), sample.num_tokens_left - 1)
        return self._policy.num_draft_tokens(sample.sequence_id, maximum=maximum) if maximum > 0 else 0

    def _maximum(self, sample: Sample) -> int:
        asked = sample.group.opened.num_speculative_tokens
        return self._num_speculative_tokens if asked is None else min(asked, self._num_speculative_tokens)
