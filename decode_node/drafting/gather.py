"""The drafts of one step: from a draft node where they are here, else from proposers in this process, else none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from decode_node.drafting.client import DraftClient, NoDrafts, StepDrafts
from decode_node.drafting.misread import MisreadWatch
from decode_node.groups import Sample
from outrider.engine.scheduler import StepRoom
from outrider.service.telemetry.logging import get_logger
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.draft_controller import ChosenDraft, DraftController
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DRAFT_NODE, DraftTree
from outrider.speculation.proposers.base import Progress, ProposalRequest, Proposer

WAIT_SHARE_OF_STEP = 0.2

_log = get_logger("drafts")


def log_failed_proposer(error: Exception, sequence_id: int) -> None:
    """A proposer in this process has failed for a sequence, which goes on without its drafts for a while."""
    _log.error("local proposer failed", sequence_id=sequence_id, error=str(error), exc_info=error)


class LocalProposer:
    """A proposer in this process, and the prompts that it has still to read. Engine thread only."""

    def __init__(self, proposer: Proposer) -> None:
        self.source = proposer.info.name
        self._proposer = proposer
        self._starts: dict[int, SequenceStart] = {}
        self._unread: dict[int, Sequence[int]] = {}  # tokens that it does not know yet, by sequence

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int]) -> None:
        self._starts[sequence_id] = start
        self._unread[sequence_id] = token_ids

    def close(self, sequence_id: int) -> None:
        self._unread.pop(sequence_id, None)
        if self._starts.pop(sequence_id, None) is not None:
            self._proposer.forget(sequence_id)

    def propose(self, wanted: Sequence[tuple[Sample, int]]) -> dict[int, DraftTree]:
        """Drafts by sequence id, of at most so many tokens.

        What time the reading of new tokens leaves goes to prompts whose KV is on its way.
        """
        starts, unread = self._starts, self._unread
        requests: list[ProposalRequest] = []
        requested: set[int] = set()
        for sample, num_wanted in wanted:
            sequence = sample.sequence
            requests.append(ProposalRequest(sequence.key, sequence.token_ids, num_wanted, starts.get(sequence.key)))
            requested.add(sequence.key)
        requests += [
            ProposalRequest(sequence_id, token_ids, 0, starts[sequence_id])
            for sequence_id, token_ids in unread.items()
            if sequence_id not in requested
        ]
        trees: dict[int, DraftTree] = {}
        for proposal in self._proposer.propose(requests) if requests else ():
            if proposal.progress is Progress.DONE:
                unread.pop(proposal.sequence_id, None)
            if proposal.tree:
                trees[proposal.sequence_id] = replace(proposal.tree, source=self.source)
        return trees


class DraftGatherer:
    """Joins the controller (how many), the draft client (from afar) and local proposers (from here), in this order.

    Engine thread only. No step waits for the network past its budget: min(`max_wait_seconds`, 20 % of the last step).
    """

    def __init__(
        self,
        *,
        client: DraftClient | NoDrafts,
        controller: DraftController,
        proposers: Sequence[Proposer] = (),
        max_wait_seconds: float = 0.0,
        takes_trees: bool = False,
    ) -> None:
        """`proposers`: each is asked for what those before it have nothing for."""
        self._client = client
        self._controller = controller
        self._local = [LocalProposer(proposer) for proposer in proposers]
        self._max_wait_seconds = max_wait_seconds
        self._takes_trees = takes_trees
        self._last_step_seconds = 0.0
        self._misread = MisreadWatch()

    def open(self, sequence_id: int, opened: OpenSequenceGroup, start: SampleStart) -> None:
        """From the grant on the sequence is announced; drafters learn the prompt while it is prefilled."""
        options, most = opened.options, self._controller.num_speculative_tokens
        if options.num_speculative_tokens is not None:
            most = min(options.num_speculative_tokens, most)
        if most <= 0:
            return
        known_token_ids = opened.known_token_ids(start)
        sequence_start = SequenceStart(
            options=options,
            sample=start.sample,
            prompt_length=len(opened.prompt_token_ids),
            # Other methods verify one path; a greedy request is verified by coupled sampling, whatever it asks for.
            takes_trees=self._takes_trees and (options.is_reproducible or options.sampling.is_greedy),
        )
        for local in self._local:
            local.open(sequence_id, sequence_start, known_token_ids)
        num_left = options.sampling.max_tokens - len(start.generated_token_ids) - 1
        num_wanted = self._controller.num_wanted(sequence_id, min(most, num_left), DRAFT_NODE)
        self._client.open(sequence_id, sequence_start, known_token_ids, num_wanted=num_wanted)

    def close(self, sequence_id: int) -> None:
        """The sequence has ended, or will not start."""
        self._client.close(sequence_id)
        self._controller.forget(sequence_id)
        for local in self._local:
            local.close(sequence_id)

    def gather(self, samples: Sequence[Sample], *, may_wait: bool = True) -> StepDrafts:
        """Drafts for the samples whose next row is a decode row. Waits within its budget only, or not at all."""
        if self._controller.num_speculative_tokens <= 0:
            return StepDrafts()
        wait_seconds = min(self._max_wait_seconds, WAIT_SHARE_OF_STEP * self._last_step_seconds) if may_wait else 0.0
        taken = self._client.take([sample.sequence.key for sample in samples], wait_seconds=wait_seconds)
        if not self._local:
            return taken
        trees, requested = dict(taken.trees), set(taken.requested)
        for local in self._local:
            wanted: list[tuple[Sample, int]] = []
            for sample in samples:
                if sample.sequence.key not in trees and (num_wanted := self._num_wanted(sample, local.source)) > 0:
                    wanted.append((sample, num_wanted))
                    requested.add(sample.sequence.key)
            trees |= local.propose(wanted)
        return replace(taken, trees=trees, requested=requested)

    def choose(
        self, drafts: StepDrafts, room: StepRoom, samples: Sequence[Sample], *, num_waiting: int
    ) -> dict[int, ChosenDraft]:
        """What the step verifies of them, by sequence id.

        `samples`: those of the room's sequences. `num_waiting`: prompts that wait for the step's processors.
        """
        trees = drafts.trees
        offers = [
            (sample.sequence.key, trees[sample.sequence.key], sample.max_draft_tokens)
            for sample in samples
            if sample.sequence.key in trees
        ]
        return self._controller.choose(offers, room, num_waiting=num_waiting)

    def observe_verdicts(self, verdicts: Iterable[tuple[int, DraftTree, Sequence[int]]]) -> None:
        """How the drafts of a step went: of each sequence the tokens that were accepted, from the root on."""
        for sequence_id, draft, accepted in verdicts:
            self._controller.observe_verdict(sequence_id, draft, accepted)
            self._misread.observe(draft.source, is_first_accepted=bool(accepted))

    def observe_step(self, *, seconds: float, num_rows: int, num_sequences: int, num_prompt_rows: int) -> None:
        """What a step cost."""
        self._last_step_seconds = seconds
        self._client.observe_step(seconds)
        self._controller.observe_step(
            seconds, num_rows=num_rows, num_sequences=num_sequences, num_prompt_rows=num_prompt_rows
        )

    def announce(self, committed: Sequence[tuple[Sample, tuple[int, ...]]]) -> None:
        """Tells the draft nodes what was committed, and how much is wanted next."""
        if self._controller.num_speculative_tokens <= 0:
            return
        self._client.update(
            [
                (sample.sequence.key, token_ids, self._num_wanted(sample, DRAFT_NODE))
                for sample, token_ids in committed
                if sample.may_draft
            ]
        )

    def _num_wanted(self, sample: Sample, source: str) -> int:
        return self._controller.num_wanted(sample.sequence.key, sample.max_draft_tokens, source)
