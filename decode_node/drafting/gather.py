"""Finds the best draft of each sequence for a step, from draft nodes and from the proposers of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from decode_node.drafting.client import DraftClient
from decode_node.groups import Sample
from decode_node.step import PlannedSequence
from outrider.drafting.book import StepDrafts
from outrider.drafting.exchange import WAIT_SHARE_OF_STEP
from outrider.engine.scheduler import EngineSequence, StepReservation
from outrider.service.telemetry.logging import get_logger
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.ask_cost import expected_gain
from outrider.speculation.draft_controller import PROBE_STEPS, DraftController
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DRAFT_NODE, DraftTree, RankedDraft
from outrider.speculation.features import Features
from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest, Proposer

GAIN_RATE = 0.02
"""Weight of each new step in the running mean of what drafts are expected to gain."""

FeaturesOf = Callable[[EngineSequence], Features]
"""Returns the features of a sequence that the target's forward passes have computed for a head."""

_log = get_logger("drafts")


def log_failed_proposer(error: Exception, sequence_id: int) -> None:
    """Logs that a proposer in this process has failed for a sequence, which gets no drafts from it for a while."""
    _log.error("local proposer failed", sequence_id=sequence_id, error=str(error), exc_info=error)


class LocalProposer:
    """A proposer in this process, and how many tokens of each sequence it has read. Engine thread only."""

    def __init__(self, proposer: Proposer, features_of: FeaturesOf | None = None) -> None:
        self.info = proposer.info
        self._proposer = proposer
        self._features_of = features_of if proposer.info.features is not None else None
        self.unread: dict[int, ProposalRequest] = {}  # requests to read prompts that are not read yet, by sequence
        self._num_read: dict[int, int] = {}  # number of tokens that are read, by sequence

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int]) -> None:
        """Announces a sequence, whose prompt may be read while its KV is transferred."""
        if self.info.features is None:  # a head needs features, which come with the KV
            self.unread[sequence_id] = ProposalRequest(sequence_id, token_ids, 0, start)

    def close(self, sequence_id: int) -> None:
        """Forgets a sequence."""
        self.unread.pop(sequence_id, None)
        self._num_read.pop(sequence_id, None)
        self._proposer.forget(sequence_id)

    def num_unread(self, samples: Sequence[Sample]) -> dict[int, int]:
        """Returns the number of tokens of each sequence that are not read, by sequence id."""
        num_read, sequences = self._num_read, [sample.sequence for sample in samples]
        return {sequence.key: len(sequence.token_ids) - num_read.get(sequence.key, 0) for sequence in sequences}

    def request(self, sample: Sample, start: SequenceStart, num_wanted: int, *, min_reach: float) -> ProposalRequest:
        """Returns a request for a draft after the newest token of the sample.

        `min_reach`: see ProposalRequest. It does not apply to drafts that are drawn. Otherwise a call's duration would
        depend on drawn tokens that are not verified, whose random words are used again for later tokens at the same
        positions.
        """
        return ProposalRequest(
            sample.sequence.key,
            sample.sequence.token_ids,
            num_wanted,
            start,
            features=self._features_of and self._features_of(sample.sequence),
            constraint=sample.sampling.constraint,
            min_reach=0.0 if start.wants_distributions else min_reach,
        )

    def propose(self, requests: Sequence[ProposalRequest], *, reads_ahead: bool) -> tuple[dict[int, Proposal], bool]:
        """Calls the proposer until each draft is complete or waits for the rest of its prefix.

        With `reads_ahead`, time that is left after reading new tokens goes to prompts whose KV is in transfer.

        Returns:
            Proposals by sequence, and whether prompts were read ahead.
        """
        found: dict[int, Proposal] = {}
        requested = {request.sequence_id for request in requests}
        ahead = [each for key, each in self.unread.items() if key not in requested] if reads_ahead else []
        drafting = [*requests, *ahead]
        while drafting:
            asked, drafting = drafting, []
            for request, proposal in zip(asked, self._proposer.propose(asked), strict=True):
                if proposal.progress is Progress.DRAFTING:
                    drafting.append(request)
                    continue
                proposal.tree.source = self.info.name
                found[request.sequence_id] = proposal
                self._num_read[request.sequence_id] = len(request.token_ids) - proposal.num_behind
                if proposal.progress is Progress.DONE:
                    self.unread.pop(request.sequence_id, None)
        return found, bool(ahead)


class DraftGatherer:
    """All sources of drafts: the client of draft nodes and the proposers of this process.

    All sources compete by the acceptance of their drafts in a sequence, as judged by the controller. A draft that a
    draft node has sent has no further cost. Proposers of this process are asked, the cheapest first, if they are
    expected to improve on the best draft so far by more than they cost. A draft that is not verified is judged by the
    tokens that were committed.

    Engine thread only. A step waits for the network at most min(`max_wait_seconds`, 20 % of the last step).
    """

    def __init__(
        self,
        *,
        client: DraftClient | None,
        controller: DraftController,
        proposers: Sequence[Proposer] = (),
        max_wait_seconds: float = 0.0,
        takes_trees: bool = False,
        features_of: FeaturesOf | None = None,
        clock: Callable[[], float] = time.perf_counter,
        loop_clock: Callable[[], int] | None = None,
    ) -> None:
        """Args:
        client: the client of draft nodes; None if there are none.
        controller: decides which sources are asked and which tokens are verified.
        proposers: the proposers of this process, whose names differ.
        max_wait_seconds: maximum seconds that a step waits for draft nodes.
        takes_trees: whether drafts may have branches.
        features_of: needed if one of the proposers is a head.
        clock: returns seconds, for the duration of calls.
        loop_clock: returns the processor time of the client's event loop, in nanoseconds, if it shares the target's
        processors.
        """
        self._client = client
        self._controller = controller
        self._local = [LocalProposer(proposer, features_of) for proposer in proposers]
        self._max_wait_seconds = max_wait_seconds
        self._takes_trees = takes_trees
        self._clock = clock
        self._loop_clock = loop_clock
        self._loop_ns = 0  # the event loop's time until the last step
        self._num_asked = 0  # sequences of this step that wanted drafts from draft nodes
        self._last_step_seconds = 0.0
        self._mean_gain = 0.0  # running mean of the tokens that drafts are expected to gain, per sequence and step
        self._num_ahead = 0  # number of consecutive steps that were launched ahead
        self._drafts: dict[int, list[RankedDraft]] = {}  # unverified drafts of this step, by sequence
        self._starts: dict[int, SequenceStart] = {}  # by sequence: the start of each open sequence that may have drafts
        self._judged: set[int] = set()  # the sequences among them whose tokens do not depend on drafts

    def open(self, sequence_id: int, opened: OpenSequenceGroup, start: SampleStart) -> None:
        """Announces a sequence when it is granted, so that drafters read the prompt during its prefill."""
        options, max_tokens = opened.options, self._controller.num_speculative_tokens
        if options.num_speculative_tokens is not None:
            max_tokens = min(options.num_speculative_tokens, max_tokens)
        if max_tokens <= 0:
            return
        known_token_ids = opened.known_token_ids(start)
        if options.adapter is not None:
            self._controller.set_adapter(sequence_id, options.adapter.fingerprint)
            options = replace(options, adapter=None)  # drafters draft for the model itself
        if is_judged := options.is_reproducible or options.sampling.is_greedy:
            self._judged.add(sequence_id)
        self._starts[sequence_id] = sequence_start = SequenceStart(
            options=options,
            sample=start.sample,
            prompt_length=len(opened.prompt_token_ids),
            takes_trees=self._takes_trees and is_judged,  # otherwise only a single path is verified
            traceparent=opened.traceparent,
        )
        for local in self._local:
            local.open(sequence_id, sequence_start, known_token_ids)
        if self._client is not None:
            num_left = options.sampling.max_tokens - len(start.generated_token_ids) - 1
            num_wanted = self._controller.num_wanted(sequence_id, min(max_tokens, num_left), DRAFT_NODE)
            self._client.open(sequence_id, sequence_start, known_token_ids, num_wanted=num_wanted)

    def close(self, sequence_id: int) -> None:
        """Forgets a sequence that has ended, or will not start."""
        if self._client is not None:
            self._client.close(sequence_id)
        self._controller.forget(sequence_id)
        self._judged.discard(sequence_id)
        if self._starts.pop(sequence_id, None) is not None:
            for local in self._local:
                local.close(sequence_id)

    @property
    def may_gather_late(self) -> bool:
        """Whether `gather` may be called while the device computes the step, since it needs no features of it."""
        return all(local.info.features is None for local in self._local)

    def awaits_drafts(self, samples: Sequence[Sample], found: StepDrafts) -> bool:
        """Returns whether the next step should be planned after the commit, rather than launched before it.

        The next step may verify what follows the first token of the drafts found for this step, new drafts of draft
        nodes, or others, as many as usual. Their expected gain must exceed the time that a launch ahead saves. After
        `PROBE_STEPS` launches ahead, one step is planned anyway, so that its duration and the drafts that are only
        judged by verification remain known.

        `samples`: the samples of the step that the device computes; `found`: its drafts from `gather`.
        """
        controller, keys = self._controller, [sample.sequence.key for sample in samples if sample.may_draft]
        if not keys or controller.num_speculative_tokens <= 0 or not (self._client or self._local):
            return False
        if controller.verifies_all or not self.may_gather_late or self._num_ahead >= PROBE_STEPS:
            return True
        gain = 0.0
        for key in keys:
            draft, record = found.ranked.get(key), controller.source(DRAFT_NODE).records.get(key)
            at_hand = 0.0 if draft is None else expected_gain(draft.probabilities[1:], controller.row_price)
            remote = 0.0 if record is None or key not in found.awaited else record.marginal_gain
            gain += max(at_hand, remote, self._mean_gain)
        return controller.cost.pays_to_wait(gain, len(samples))

    def gather(self, samples: Sequence[Sample], *, may_wait: bool = True) -> StepDrafts:
        """Finds drafts for samples whose next row is a decode row. With `may_wait`, waits within its budget."""
        if self._controller.num_speculative_tokens <= 0:
            return StepDrafts()
        drafts = StepDrafts()
        if self._client is not None:
            budget = min(self._max_wait_seconds, WAIT_SHARE_OF_STEP * self._last_step_seconds) if may_wait else 0.0
            drafts = self._client.take([sample.sequence.key for sample in samples], wait_seconds=budget)
        self._num_asked = len(drafts.requested)
        limits, rank = {sample.sequence.key: sample.max_draft_tokens for sample in samples}, self._controller.rank
        drafts.ranked = {key: rank(key, tree, limits[key]) for key, tree in drafts.trees.items() if tree}
        self._drafts = {sequence_id: [draft] for sequence_id, draft in drafts.ranked.items()}
        for local in sorted(self._local, key=lambda each: self._controller.source(each.info.name).cost.call_seconds):
            self._ask(local, samples, limits, drafts.ranked)
        if drafts.requested:
            found = {key: self._drafts.get(key, ()) for key in drafts.requested}
            self._controller.observe_marginal_gain(DRAFT_NODE, found)
        gain = sum([draft.gain for draft in drafts.ranked.values()])
        self._mean_gain += GAIN_RATE * (gain / max(len(samples), 1) - self._mean_gain)
        return drafts

    def _ask(
        self, local: LocalProposer, samples: Sequence[Sample], limits: Mapping[int, int], best: dict[int, RankedDraft]
    ) -> None:
        """Asks a proposer for the drafts that are worth their cost, and keeps each sequence's best draft in `best`.

        `limits`: the maximum number of draft tokens that may be verified, by sequence id.
        """
        controller, source = self._controller, local.info.name
        if local.info.needs_constraint:
            samples = [sample for sample in samples if sample.sampling.constraint is not None]
            if not samples:
                return
            limits = {sample.sequence.key: limits[sample.sequence.key] for sample in samples}
        reads_ahead, num_unread = bool(local.unread) and controller.is_cheap(source), local.num_unread(samples)
        asked = controller.choose_calls(source, limits, best, num_unread)
        if not (asked or reads_ahead):
            return
        min_reach = controller.min_reach(source, len(asked))
        started = self._clock()
        requests = [
            local.request(sample, self._starts[key], asked[key], min_reach=min_reach)
            for sample in samples
            if (key := sample.sequence.key) in asked
        ]
        proposals, has_read_ahead = local.propose(requests, reads_ahead=reads_ahead)
        seconds = self._clock() - started
        num_read = sum([num_unread[key] - proposals[key].num_behind for key in asked])
        found = {key: controller.rank(key, each.tree, limits[key]) for key, each in proposals.items() if each.tree}
        controller.observe_calls(
            source,
            {key: number for key, number in asked.items() if proposals[key].progress is Progress.DONE},
            found,
            seconds=seconds,
            num_read=None if has_read_ahead else max(0, num_read),  # negative if read tokens were forgotten
        )
        for sequence_id, draft in found.items():
            current = best.get(sequence_id)
            best[sequence_id] = draft if current is None else max(draft, current, key=lambda each: each.value)
            self._drafts.setdefault(sequence_id, []).append(draft)

    def choose(
        self, drafts: StepDrafts, room: StepReservation, samples: Sequence[Sample], *, num_waiting: int
    ) -> dict[int, int]:
        """Returns how many of each draft's first tokens the step verifies, by sequence id.

        `samples`: the samples of the sequences in `room`. `num_waiting`: prompts that wait for the step's processors.
        """
        best = {key: drafts.ranked[key] for sample in samples if (key := sample.sequence.key) in drafts.ranked}
        return self._controller.choose(best, room, num_waiting=num_waiting, judged=self._judged)

    def begin_step(self, planned: Sequence[PlannedSequence]) -> None:
        """Sends what `announce` has recorded, and which drafts the step verifies."""
        if self._client is not None:
            deciding = [each for each in planned if each.scheduled.reaches_end]
            self._client.begin_step({each.sample.sequence.key: each.draft.likeliest_path() for each in deciding})

    def send_updates(self) -> None:
        """Sends what `announce` has recorded, as no step begins now."""
        if self._client is not None:
            self._client.wake()

    def observe_verdict(self, sequence_id: int, draft: DraftTree, accepted: Sequence[int]) -> None:
        """Records which tokens of a verified draft were accepted. `accepted`: their indices, from the root on."""
        self._controller.observe_verdict(sequence_id, draft, accepted)
        self._warn_if_misloaded(draft.source)
        others = [each for each in self._drafts.get(sequence_id, ()) if each.tree.source != draft.source]
        self._drafts[sequence_id] = others

    def observe_step(
        self, *, seconds: float, num_rows: int, num_sequences: int, num_prompt_rows: int, is_ahead: bool = False
    ) -> None:
        """Records the duration of a step. `is_ahead`: whether it was launched before the previous one was committed."""
        self._last_step_seconds = seconds
        self._num_ahead = self._num_ahead + 1 if is_ahead else 0
        if self._client is not None:
            self._client.observe_step(seconds)
        if self._loop_clock is not None:
            before, self._loop_ns = self._loop_ns, self._loop_clock()
            if num_rows and not num_prompt_rows:
                # If the engine was idle before the step, most of the loop's time passed before it.
                loop_seconds = min((self._loop_ns - before) / 1e9, seconds)
                self._controller.observe_messages(
                    DRAFT_NODE, loop_seconds, num_asked=self._num_asked, num_sequences=num_sequences
                )
        self._controller.observe_step(
            seconds,
            num_rows=num_rows,
            num_sequences=num_sequences,
            num_prompt_rows=num_prompt_rows,
            is_ahead=is_ahead,
        )

    def announce(self, committed: Sequence[tuple[Sample, tuple[int, ...]]]) -> None:
        """Judges unverified drafts by the committed tokens.

        Tells draft nodes the committed tokens and the number of draft tokens that are wanted next. If streams share the
        target's processors, both are sent by `begin_step`, or by `send_updates` if no step begins at once.
        """
        if self._controller.num_speculative_tokens <= 0:
            return
        for sample, token_ids in committed:
            sequence_id = sample.sequence.key
            unverified = self._drafts.pop(sequence_id, ())
            if unverified and sequence_id in self._judged:
                for draft, *_ in unverified:
                    self._controller.observe_committed(sequence_id, draft, token_ids)
                    self._warn_if_misloaded(draft.source)
        if self._client is None:
            return
        drafting = [(sample, token_ids) for sample, token_ids in committed if sample.may_draft]
        tables = {}
        if self._client.needs_features:
            tables = {each.sequence.key: kv for each, _ in drafting if (kv := each.sequence.kv) is not None}
        num_wanted = self._controller.num_wanted
        self._client.commit(
            [
                (sample.sequence.key, token_ids, num_wanted(sample.sequence.key, sample.max_draft_tokens, DRAFT_NODE))
                for sample, token_ids in drafting
            ],
            tables,
            min_reach=self._controller.min_reach(DRAFT_NODE, len(drafting)),
            # Streams with processors of their own send at once. On a GPU, their reads of features wait for all forwards
            # that are queued by then.
            wakes=self._loop_clock is None,
        )

    def _warn_if_misloaded(self, source: str) -> None:
        """Warns once if almost no drafts of a head or draft model (whose name has a colon) are accepted."""
        known = self._controller.source(source)
        if known.is_probably_misloaded and (source == DRAFT_NODE or ":" in source):
            _log.warning(
                "almost none of these draft tokens are accepted: the head or draft model was probably loaded wrongly, "
                "or was made for another target; check that it names this target, its layer ids (counted from the "
                "input of a layer or from its output), the flags of its norms, and its d2t",
                proposer=source,
                num_drafts=known.num_checked,
                num_first_tokens_accepted=known.num_first_accepted,
            )
