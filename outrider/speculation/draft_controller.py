"""Who drafts, and how many draft tokens of each sequence a step verifies: decisions over the whole batch.

A draft token costs a row, and a row costs time that all sequences wait for. The controller knows how likely each draft
token is (`AcceptanceRecord`, by sequence, proposer, grade and position) and how long steps take (`StepCostModel`), and
gives rows to those that win most (`StepOffer.choose`). No row at all is a choice as well. A sequence that gets none is
tried again with a single token now and then, for a small share of the time.

To ask a proposer in this process costs time as well (`AskCost`): it is asked for those sequences whose draft at hand
it is expected to better by more than that (`choose_asked`), and tried again now and then as above.

A draft that was drawn for the ratio test of rejection sampling counts as what was expected before it was drawn: the
test is exact only where no drawn token decides whether it, or another draft, is judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.engine.scheduler import StepRoom
from outrider.speculation.acceptance_record import AcceptanceRecord
from outrider.speculation.ask_cost import Candidate, choose_asked, expected_gain
from outrider.speculation.draft_source import DraftSource, SourceRecord
from outrider.speculation.draft_tree import DraftTree, RankedDraft
from outrider.speculation.row_choice import RowChoice, StepOffer
from outrider.speculation.step_cost import StepCostModel

PROBE_STEPS = 32
"""A sequence whose drafts were not verified for so many steps may be tried again, and a proposer not asked for them."""

TRIAL_STEPS = 4
"""Of `PROBE_STEPS`, in which a draft node that adds nothing is asked: drafts may arrive some steps after the first."""

CHEAP_PROBE_STEPS = 8
"""The same of a proposer that costs next to nothing."""

SPEEDUP_STEPS = 32
"""Over which the batch's speedup is averaged: what time is worth."""

PROBE_SHARE = 0.005
"""Of the time, for such trials."""

MAX_PROBE_CREDIT = 1.0
"""Of the time of a step without drafts, saved up for trials."""

LEARN_STEPS = 4
"""One of so many steps may have another number of rows than the best one, so that their time is known."""

WORTH_ASKING = 0.5
"""Drafts are asked for if their first token is at least this share of the probability that pays at present."""


@dataclass(slots=True)
class DraftController:
    """Decides which draft tokens are asked for and which are verified. Engine thread only.

    Order of calls in a step: `rank` for each draft as it comes, `choose_asked` and `observe_asked` for each proposer of
    this process, the cheapest first, `observe_marginal_gain` for draft nodes, `choose` for the best drafts, the
    forward, `observe_verdict` for each sequence whose draft was verified, `observe_committed` for drafts that were not,
    `observe_step` once. `num_wanted` says what draft nodes are asked for.
    """

    num_speculative_tokens: int
    cost: StepCostModel = field(default_factory=StepCostModel)
    verifies_all: bool = False  # every draft token that there is room for, at any price: a fixed number of draft tokens
    row_price: float = 0.0  # least probability of a draft token that would have paid in the last step
    _sources: defaultdict[str, DraftSource] = field(default_factory=lambda: defaultdict(DraftSource))
    _step: int = 0
    _num_waiting: int = 0  # prompts, in the last step
    _token_rate: float = 0.0  # tokens in a second, that the batch would generate: what time was worth in the last step
    _plain_seconds: float = float("inf")  # of the last step, had it been one without drafts; unknown before the first
    _asked_seconds: float = 0.0  # spent on drafts since the last choice
    _speedup: float = 1.0  # running mean of the expected rate over that of plain decoding
    _probe_credit: float = float("inf")  # seconds, limited in each step

    def num_wanted(self, sequence_id: int, maximum: int, source: str) -> int:
        """How many draft tokens of that proposer might be worth verifying in the next step, 0 to `maximum`.

        A message takes processor time on both sides: where a proposer adds nothing, it is asked now and then.
        """
        maximum = min(maximum, self.num_speculative_tokens)
        if maximum <= 0 or self.verifies_all:
            return max(maximum, 0)
        found = self._record(sequence_id, source)
        least = WORTH_ASKING * self.row_price
        if found.adds_nothing and self._step % PROBE_STEPS >= TRIAL_STEPS:
            return 0
        chain = found.best().chain
        if chain[0] < least:
            return int(self._step - found.last_step >= PROBE_STEPS)
        if chain[maximum - 1] >= least:
            return maximum
        return sum(each >= least for each in chain[:maximum])

    def call_seconds(self, source: str) -> float:
        """What it takes to ask that proposer; 0 until it is known. The cheapest is asked first."""
        return self._sources[source].cost.call_seconds

    def is_cheap(self, source: str) -> bool:
        """Whether it costs next to nothing to ask that proposer."""
        return self._sources[source].cost.is_cheap(self._plain_seconds)

    def rank(self, sequence_id: int, draft: DraftTree) -> RankedDraft:
        """The draft by falling probability of its tokens, of which as many have one as may be verified.

        A drawn draft, whatever its length, has the probabilities of as many tokens as it might have had.
        """
        record = self._record_of(sequence_id, draft)
        if draft.was_drawn:
            return RankedDraft(draft, record.chain)
        tree, probabilities = record.rank(draft)
        return RankedDraft(tree, probabilities[: self.num_speculative_tokens])

    def choose_asked(
        self, source: str, wanted: Mapping[int, int], drafts: Mapping[int, RankedDraft], num_missed: Mapping[int, int]
    ) -> dict[int, int]:
        """For how many tokens a proposer of this process is asked now, by sequence id; absent: for none.

        Args:
            source: the proposer's name.
            wanted: by sequence of the batch, the most draft tokens that may be verified.
            drafts: that are at hand, by sequence.
            num_missed: by sequence, tokens that the proposer has not read; absent: none.
        """
        known = self._sources[source]
        if self.is_cheap(source):
            asked = self._ask_cheap(source, wanted)
        else:
            asked = self._choose_asked(source, wanted, drafts, num_missed)
        for sequence_id in asked:
            known.records[sequence_id].last_asked = self._step
        return asked

    def min_reach(self, source: str, num_asked: int) -> float:
        """How likely a draft token of so many sequences must be reached for another one after it to pay."""
        if self.verifies_all or not num_asked:
            return 0.0
        known = self._sources[source]
        seconds = known.cost.seconds(1, num_asked, 0) - known.cost.seconds(0, 0, 0)
        return (self.row_price + self._token_rate * seconds / num_asked) / known.overall.mean

    def observe_asked(
        self,
        source: str,
        asked: Mapping[int, int],
        found: Mapping[int, RankedDraft],
        *,
        seconds: float,
        num_read: int | None,
    ) -> None:
        """What a proposer has made of these requests, and how long it took.

        `asked`: but for sequences whose text is still to be read. `num_read`: tokens that it has read; None: it read
        more than these need.
        """
        known = self._sources[source]
        if any(draft.tree.was_drawn for draft in found.values()):  # how long it took depends on what was drawn
            self._asked_seconds += known.cost.seconds(
                max(asked.values(), default=0), sum(asked.values()), num_read or 0
            )
        else:
            self._asked_seconds += seconds
        if num_read is None or not (asked or num_read):
            return
        depths = [found[key].tree.depth if key in found else number for key, number in asked.items()]
        known.cost.observe(seconds, depth=max(depths, default=1), num_tokens=sum(depths), num_missed=num_read)
        if self.is_cheap(source):
            return
        known.observe_trial(asked, num_read=num_read)
        for (sequence_id, number), depth in zip(asked.items(), depths, strict=True):
            draft = found.get(sequence_id)
            probabilities = () if draft is None else draft.probabilities
            was_drawn = draft is not None and draft.tree.was_drawn
            expected = self._record(sequence_id, source).overall.chain[: number if was_drawn else depth]
            known.observe_tree_bonus(
                expected=expected_gain(expected, self.row_price),
                found=expected_gain(probabilities[:number] if was_drawn else probabilities, self.row_price),
            )

    def observe_marginal_gain(self, source: str, drafts: Mapping[int, Sequence[RankedDraft]]) -> None:
        """What that proposer's drafts were worth beside others. `drafts`: of all, by sequence that it was asked for."""
        for sequence_id, found in drafts.items():
            tokens = {each.tree.source: sum(each.probabilities) for each in found}
            own = tokens.pop(source, 0.0)
            self._record(sequence_id, source).observe_marginal_gain(max(own - max(tokens.values(), default=0.0), 0.0))

    def better(self, one: RankedDraft, other: RankedDraft) -> RankedDraft:
        """The one of two drafts of a sequence that is expected to win more."""

        def value(draft: RankedDraft) -> tuple[float, float]:
            return expected_gain(draft.probabilities, self.row_price), sum(draft.probabilities)

        return max(one, other, key=value)

    def choose(
        self, drafts: Mapping[int, RankedDraft], limits: Mapping[int, int], room: StepRoom, *, num_waiting: int = 0
    ) -> dict[int, int]:
        """How many of its first tokens are verified of each draft, by sequence id; absent: none.

        Args:
            drafts: by sequence id.
            limits: by id of the step's sequences, the most draft tokens that may be verified.
            room: what the step has for drafts.
            num_waiting: prompts that wait for the step's processors. Those that are computed in the step are added.
        """
        if self.num_speculative_tokens <= 0 or not room.sequences:
            return {}
        offered = [sequence_id for sequence_id in limits if sequence_id in drafts]
        self._num_waiting = num_waiting + len(room.prompts)
        num_possible = min(room.max_draft_rows, len(room.sequences) * self.num_speculative_tokens)
        step_seconds = self.cost.seconds(len(room.sequences), room.num_rows, num_more=num_possible)
        probabilities = [drafts[key].probabilities[: max(0, limits[key])] for key in offered]
        offer = StepOffer(
            drafts=probabilities,
            step_seconds=[each + self._asked_seconds for each in step_seconds],  # whatever is verified, they are spent
            max_rows=min(sum(map(len, probabilities)), num_possible, self._max_explored_rows(room)),
            num_sequences=len(room.sequences),
            num_waiting=self._num_waiting,
        )
        plain_seconds = step_seconds[0]
        max_credit = MAX_PROBE_CREDIT * plain_seconds
        self._asked_seconds = 0.0
        if self.cost.is_known:
            self._plain_seconds = plain_seconds
        choice = offer.choose(num_rows=offer.max_rows if self.verifies_all else None)
        self.row_price = choice.row_price
        if not room.prompts:
            speedup = choice.expected_tokens / choice.expected_seconds * plain_seconds / offer.num_sequences
            self._speedup += (max(speedup, 1.0) - self._speedup) / SPEEDUP_STEPS
        self._probe_credit = min(self._probe_credit + PROBE_SHARE * plain_seconds, max_credit)
        for source in self._sources.values():
            source.earn(PROBE_SHARE * plain_seconds, max_credit=max_credit)
        num_rows = choice.num_rows
        if not self.verifies_all:
            if self._step % LEARN_STEPS == 0:
                choice = self._with_other_rows(offer, choice, room.num_rows)
            records = [self._record_of(key, drafts[key].tree) for key in offered]
            num_rows = self._with_probes(offer, choice, records, max_credit=max_credit)
        return {key: min(count, len(drafts[key].tree)) for key, count in zip(offered, num_rows, strict=True) if count}

    def observe_verdict(self, sequence_id: int, draft: DraftTree, accepted: Sequence[int]) -> None:
        """Learns how one draft went: the tokens of it that were accepted, from the root on."""
        self._record(sequence_id, draft.source).observe(draft, accepted, step=self._step, anew_after=PROBE_STEPS)

    def is_misread(self, source: str) -> bool:
        """Whether, by the verdict just observed, the proposer has drafted too badly for one that is loaded rightly."""
        return self._sources[source].is_misread

    def observe_committed(self, sequence_id: int, draft: DraftTree, token_ids: Sequence[int]) -> None:
        """Learns from a draft that was not verified: what was committed in its place says which tokens were right.

        True of coupled sampling, where a position's token does not depend on drafts.
        """
        if draft.parents:
            depths = draft.depths()
            draft = draft.only([index for index, depth in enumerate(depths) if depth <= len(token_ids)])
        else:
            draft = draft.cut(len(token_ids))
        self.observe_verdict(sequence_id, draft, draft.path_of(token_ids))

    def observe_step(self, seconds: float, *, num_rows: int, num_sequences: int, num_prompt_rows: int) -> None:
        """Learns what a step cost. One that computed prompts says little about drafts, and is left out."""
        self._step += 1
        if num_rows and not num_prompt_rows:
            self.cost.observe(num_sequences=num_sequences, num_rows=num_rows, step_seconds=seconds)

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended; an unknown one is fine."""
        for source in self._sources.values():
            source.records.pop(sequence_id, None)

    def _ask_cheap(self, source: str, wanted: Mapping[int, int]) -> dict[int, int]:
        """For all that a draft of some grade could win: the answer says of which it is."""
        least = WORTH_ASKING * self.row_price
        asked: dict[int, int] = {}
        for sequence_id, limit in wanted.items():
            if limit > 0:
                record = self._record(sequence_id, source)
                is_due = self.verifies_all or self._step - record.last_step >= CHEAP_PROBE_STEPS
                if is_due or record.best().chain[0] >= least:
                    asked[sequence_id] = min(limit, self.num_speculative_tokens)
        return asked

    def _choose_asked(
        self, source: str, wanted: Mapping[int, int], drafts: Mapping[int, RankedDraft], num_missed: Mapping[int, int]
    ) -> dict[int, int]:
        """The same of a proposer that costs something."""
        known = self._sources[source]
        row_price = 0.0 if self.verifies_all else self.row_price
        # Prompts that wait for the end of the step wait for its drafts as well.
        self._token_rate = (
            0.0 if self.verifies_all else self._speedup * (len(wanted) + self._num_waiting) / self._plain_seconds
        )
        candidates: list[Candidate] = []
        for sequence_id, limit in wanted.items():
            if limit > 0:
                draft = drafts.get(sequence_id)
                at_hand = () if draft is None else draft.probabilities[:limit]
                chain = self._record(sequence_id, source).overall.chain[:limit]
                missed = num_missed.get(sequence_id, 0)
                gain = expected_gain(at_hand, row_price)
                candidates.append(Candidate(sequence_id, chain, gain, missed, known.tree_bonus))
        asked = choose_asked(candidates, known.cost, token_rate=self._token_rate, row_price=row_price)
        known.add_trial(
            asked, {each.sequence_id: each.num_missed for each in candidates}, before=self._step - PROBE_STEPS
        )
        return asked

    def _max_explored_rows(self, room: StepRoom) -> int:
        """Rows for drafts up to the size that a step may grow to: see `StepCostModel.reach`."""
        reach = None if room.prompts or self.verifies_all else self.cost.reach()
        return room.max_draft_rows if reach is None else max(0, reach - room.num_rows)

    def _with_other_rows(self, offer: StepOffer, choice: RowChoice, num_rows: int) -> RowChoice:
        """The choice, or one of another number of rows whose time is not known well, when there is credit for it.

        Of no rows for drafts, so that it is known what drafts win, or of a few more or less. `num_rows`: of the step
        without drafts.
        """
        num_best = sum(choice.num_rows)
        plain = None if self.cost.is_known_at(num_rows) else num_rows
        for total in (plain, *self.cost.unknown_near(num_rows + num_best)):
            if total is None or not 0 <= total - num_rows <= offer.max_rows or total - num_rows == num_best:
                continue
            other = offer.choose(num_rows=total - num_rows)
            won_tokens = other.expected_tokens - choice.expected_tokens
            lost_seconds = (
                offer.priced(other.expected_seconds - choice.expected_seconds) - won_tokens * choice.token_seconds
            )
            if lost_seconds < self._probe_credit:
                self._probe_credit -= max(lost_seconds, 0.0)
                return other
        return choice

    def _with_probes(
        self, offer: StepOffer, choice: RowChoice, records: Sequence[AcceptanceRecord], *, max_credit: float
    ) -> Sequence[int]:
        """The choice, and single tokens of sequences that had none for long: the longest first, as credit allows."""
        due = [
            (record.last_step, place)
            for place, (count, record) in enumerate(zip(choice.num_rows, records, strict=True))
            if not count and self._step - record.last_step >= PROBE_STEPS and offer.drafts[place]
        ]
        if not due:
            return choice.num_rows
        num_rows = list(choice.num_rows)
        total = sum(num_rows)
        for _, place in sorted(due):
            if total == offer.max_rows:
                break
            price = offer.priced(offer.step_seconds[total + 1] - offer.step_seconds[total])
            if price >= self._probe_credit < max_credit:
                break  # full, it pays for any: the debt is paid before the next one
            self._probe_credit -= price
            num_rows[place] = 1
            total += 1
        return num_rows

    def _record_of(self, sequence_id: int, draft: DraftTree) -> AcceptanceRecord:
        return self._record(sequence_id, draft.source).of(draft.grade)

    def _record(self, sequence_id: int, source: str) -> SourceRecord:
        """A new sequence is due for a trial at once, should its proposer be thought little of."""
        known = self._sources[source]
        record = known.records.get(sequence_id)
        if record is None:
            record = SourceRecord(known, self.num_speculative_tokens, step=self._step - PROBE_STEPS)
            known.records[sequence_id] = record
        return record
