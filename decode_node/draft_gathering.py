"""The drafts of one step: from a draft node where they are here, else from the local fallback, else none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from decode_node.drafts import DraftClient, DraftWant, NoDrafts
from decode_node.groups import Sample
from decode_node.step_drafts import StepDrafts
from outrider.engine.scheduler import DraftRoom
from outrider.request import VerificationMethod
from outrider.service.telemetry.logging import get_logger
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.draft_controller import DraftController, StepForecast
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DraftSource, DraftTree
from outrider.speculation.proposers.base import Progress, ProposalRequest, Proposer

WAIT_SHARE_OF_STEP = 0.2

_log = get_logger("drafts")


def log_failed_fallback(error: Exception, sequence_ids: Sequence[int]) -> None:
    """The local proposer has failed: these sequences go on without drafts for a while."""
    _log.error("local proposer failed", num_sequences=len(sequence_ids), error=str(error), exc_info=error)


class DraftGatherer:
    """Joins controller (how many), draft client (from afar) and fallback (from here). Engine thread only.

    No step waits for the network past its budget: min(`max_wait_seconds`, 20 % of the
    last step).
    """

    def __init__(
        self,
        *,
        client: DraftClient | NoDrafts,
        fallback: Proposer | None,
        controller: DraftController,
        max_wait_seconds: float,
        takes_trees: bool = False,
    ) -> None:
        self._client = client
        self._fallback = fallback
        self._controller = controller
        self._max_wait_seconds = max_wait_seconds
        self._takes_trees = takes_trees
        self._last_step_seconds = 0.0
        self._next_wants: dict[int, DraftWant] = {}  # of the sequences that the last step has moved on
        self._unindexed: dict[int, Sequence[int]] = {}  # tokens that the fallback does not know yet, by sequence

    def open(self, sequence_id: int, opened: OpenSequenceGroup, start: SampleStart) -> None:
        """From the grant on the sequence is announced; drafters learn the prompt while it is prefilled."""
        if self._maximum(opened) == 0:
            return
        known_token_ids = opened.known_token_ids(start)
        if self._fallback is not None:
            self._unindexed[sequence_id] = known_token_ids
        self._client.open(
            sequence_id,
            SequenceStart(
                params=opened.sampling,
                sample=start.sample,
                prompt_length=len(opened.prompt_token_ids),
                stop_token_ids=opened.stop_token_ids,
                verification_method=opened.verification_method,
                cache_salt=opened.cache_salt,
                # Other methods verify one path; a greedy request is verified by coupled sampling, whatever it asks for.
                takes_trees=self._takes_trees
                and (opened.verification_method is VerificationMethod.COUPLED or opened.sampling.is_greedy),
            ),
            known_token_ids,
        )

    def close(self, sequence_id: int) -> None:
        """The sequence has ended, or will not start."""
        self._client.close(sequence_id)
        self._controller.forget(sequence_id)
        self._unindexed.pop(sequence_id, None)
        if self._fallback is not None:
            self._fallback.forget(sequence_id)

    def gather(self, samples: Sequence[Sample], *, may_wait: bool = True) -> StepDrafts:
        """Drafts for the samples whose next row is a decode row. Waits within its budget only, or not at all."""
        wants = self._wants(samples, DraftSource.DRAFT_NODE)
        wait_seconds = min(self._max_wait_seconds, WAIT_SHARE_OF_STEP * self._last_step_seconds) if may_wait else 0.0
        taken = self._client.take(wants, wait_seconds=wait_seconds) if wants else StepDrafts()
        wanting = {want.sequence_id for want in wants}
        trees = dict(taken.trees)
        if self._fallback is not None:
            missing = self._wants(
                [sample for sample in samples if not taken.of(sample.sequence_id)], DraftSource.FALLBACK
            )
            wanting.update(want.sequence_id for want in missing)
            trees |= self._propose(self._fallback, missing)
        return replace(taken, trees=trees, wanting=frozenset(wanting))

    def _propose(self, fallback: Proposer, wants: Sequence[DraftWant]) -> dict[int, DraftTree]:
        """Drafts from here. What time the indexing of new tokens leaves goes to prompts that are being prefilled."""
        requests = [ProposalRequest(want.sequence_id, want.token_ids, want.num_wanted) for want in wants]
        wanting = {want.sequence_id for want in wants}
        requests += [
            ProposalRequest(sequence_id, token_ids, num_wanted=0)
            for sequence_id, token_ids in self._unindexed.items()
            if sequence_id not in wanting
        ]
        trees: dict[int, DraftTree] = {}
        for proposal in fallback.propose(requests) if requests else ():
            if proposal.progress is not Progress.CATCHING_UP:
                self._unindexed.pop(proposal.sequence_id, None)
            if proposal.tree:
                trees[proposal.sequence_id] = replace(proposal.tree, source=DraftSource.FALLBACK)
        return trees

    def choose(self, drafts: StepDrafts, room: DraftRoom, *, num_waiting: int) -> dict[int, DraftTree]:
        """What the step verifies of them, by sequence id. `num_waiting`: prompts that wait for its processors."""
        trees = drafts.trees
        offered = [(sequence.key, trees[sequence.key]) for sequence in room.sequences if sequence.key in trees]
        return self._controller.choose(offered, room, num_waiting=num_waiting)

    def observe_verdicts(self, verdicts: Iterable[tuple[Sample, DraftTree, Sequence[int]]]) -> None:
        """How the drafts of a step went: of each the tokens that were accepted, from the root on."""
        observe = self._controller.observe_verdict
        for sample, draft, accepted in verdicts:
            observe(sample.sequence.key, draft, accepted)

    def observe_step(
        self, *, seconds: float, num_rows: int, num_sequences: int, num_prompt_rows: int
    ) -> StepForecast | None:
        """What a step cost. Returns what had been expected of it; None for one that computed prompts."""
        self._last_step_seconds = seconds
        self._client.observe_step(seconds)
        return self._controller.observe_step(
            seconds, num_rows=num_rows, num_sequences=num_sequences, num_prompt_rows=num_prompt_rows
        )

    def announce(self, committed: Sequence[tuple[Sample, tuple[int, ...]]]) -> None:
        """Tells the draft nodes what was committed, and how much is wanted next."""
        self._next_wants = {}
        if self._controller.num_speculative_tokens <= 0:
            return
        updates: list[tuple[int, Sequence[int], int]] = []
        for sample, token_ids in committed:
            opened = sample.group.opened
            if opened.num_speculative_tokens == 0:
                continue
            want = self._want(sample, DraftSource.DRAFT_NODE)
            self._next_wants[want.sequence_id] = want
            updates.append((want.sequence_id, token_ids, want.num_wanted))
        if updates:
            self._client.update(updates)

    def _wants(self, samples: Sequence[Sample], source: DraftSource) -> list[DraftWant]:
        known = self._next_wants if source is DraftSource.DRAFT_NODE else {}
        wants = [known.get(sample.sequence.key) or self._want(sample, source) for sample in samples]
        return [want for want in wants if want.num_wanted > 0]

    def _want(self, sample: Sample, source: DraftSource) -> DraftWant:
        """The step's last token needs no draft: a sample with one token left wants none."""
        sequence, asked = sample.sequence, sample.group.opened.num_speculative_tokens
        most = sample.max_length - len(sequence.token_ids) - 1
        if asked is not None and asked < most:
            most = asked
        most = min(most, self._controller.num_speculative_tokens)
        num_wanted = self._controller.num_wanted(sequence.key, most, source) if most > 0 else 0
        return DraftWant(sequence.key, sequence.token_ids, num_wanted, most)

    def _maximum(self, opened: OpenSequenceGroup) -> int:
        asked = opened.num_speculative_tokens
        most = self._controller.num_speculative_tokens
        return most if asked is None else min(asked, most)
