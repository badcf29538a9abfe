"""How many draft tokens of each sequence a step verifies: one decision over the whole batch.

A draft token costs a row, and a row costs time that all sequences wait for. The controller knows how likely each draft
token is (`AcceptanceRecord`, by sequence, proposer and position) and how long steps take (`StepCostModel`), and gives
rows to those that win most (`choose_rows`). No row at all is a choice as well. A sequence that gets none is tried again
with a single token now and then, for a small share of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.scheduler import StepRoom
from outrider.speculation.acceptance_record import AcceptanceRecord, SourceAcceptance
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.row_choice import RowChoice, choose_rows
from outrider.speculation.step_cost import StepCostModel

PROBE_STEPS = 32
"""A sequence whose drafts were not verified for so many steps may be tried again."""

PROBE_SHARE = 0.005
"""Of the time, for such trials."""

MAX_PROBE_CREDIT = 1.0
"""Of the time of a step without drafts, saved up for trials."""

LEARN_STEPS = 4
"""One of so many steps may have another number of rows than the best one, so that their time is known."""

WORTH_ASKING = 0.5
"""Drafts are asked for if their first token is at least this share of the probability that pays at present."""


class ChosenDraft(NamedTuple):
    """What is verified of one draft: so many of its tokens."""

    tree: DraftTree  # by falling worth
    num_tokens: int  # at least 1


class _Offer:
    """What one step may verify, and at which price."""

    def __init__(
        self,
        probabilities: Sequence[Sequence[float]],
        room: StepRoom,
        cost: StepCostModel,
        *,
        num_waiting: int,
        num_speculative_tokens: int,
        verifies_all: bool,
    ) -> None:
        self.probabilities = probabilities
        self.num_rows = room.num_rows
        self.num_sequences = len(room.sequences)
        self.num_waiting = num_waiting
        num_possible = min(room.max_draft_rows, self.num_sequences * num_speculative_tokens)
        self.max_rows = min(sum(map(len, probabilities)), num_possible)
        reach = None if room.prompts or verifies_all else cost.reach()
        if reach is not None:
            self.max_rows = max(0, min(self.max_rows, reach - room.num_rows))
        self.step_seconds = cost.seconds(self.num_sequences, room.num_rows, num_more=num_possible)
        self.plain_seconds = self.step_seconds[0]

    def priced(self, seconds: float) -> float:
        """These and those of the prompts that wait for them."""
        return seconds * (1.0 + self.num_waiting / max(self.num_sequences, 1))

    def choose(self, *, num_rows: int | None = None) -> RowChoice:
        """The best rows; of `num_rows`, where that is said."""
        return choose_rows(
            self.probabilities,
            self.step_seconds,
            max_rows=self.max_rows,
            num_tokens=max(self.num_sequences, 1),
            num_waiting=self.num_waiting,
            num_rows=num_rows,
        )


@dataclass(slots=True)
class DraftController:
    """Decides which draft tokens are asked for and which are verified. Engine thread only.

    Order of calls in a step: `num_wanted` for each sequence, `choose` for all drafts there are, the forward,
    `observe_verdict` for each sequence whose draft was verified, `observe_step` once.
    """

    num_speculative_tokens: int
    cost: StepCostModel = field(default_factory=StepCostModel)
    verifies_all: bool = False  # every draft token that there is room for, at any price: a fixed number of draft tokens
    row_price: float = 0.0  # least probability of a draft token that would have paid in the last step
    _records: defaultdict[str, dict[int, AcceptanceRecord]] = field(default_factory=lambda: defaultdict(dict))
    _sources: defaultdict[str, SourceAcceptance] = field(default_factory=lambda: defaultdict(SourceAcceptance))
    _step: int = 0
    _probe_credit: float = float("inf")  # seconds, limited in each step

    def num_wanted(self, sequence_id: int, maximum: int, source: str) -> int:
        """How many draft tokens of that proposer might be worth verifying in the next step, 0 to `maximum`."""
        maximum = min(maximum, self.num_speculative_tokens)
        if maximum <= 0 or self.verifies_all:
            return max(maximum, 0)
        record = self._records[source].get(sequence_id)
        if record is None:
            record = self._start(sequence_id, source)
        least = WORTH_ASKING * self.row_price
        chain = record.chain
        if chain[0] < least:
            return int(self._step - record.last_step >= PROBE_STEPS)
        if chain[maximum - 1] >= least:
            return maximum
        return sum(each >= least for each in chain[:maximum])

    def choose(
        self, offers: Sequence[tuple[int, DraftTree, int]], room: StepRoom, *, num_waiting: int = 0
    ) -> dict[int, ChosenDraft]:
        """What is verified of these drafts, by sequence id; those without rows are absent.

        Args:
            offers: sequence id, its draft, and the most tokens of it that may be verified.
            room: what the step has for drafts.
            num_waiting: prompts that wait for the step's processors. Those that are computed in the step are added.
        """
        if self.num_speculative_tokens <= 0 or not room.sequences:
            return {}
        records: list[AcceptanceRecord] = []
        trees: list[DraftTree] = []
        probabilities: list[Sequence[float]] = []
        for sequence_id, draft, limit in offers:
            record = self._records[draft.source].get(sequence_id) or self._start(sequence_id, draft.source)
            tree, found = record.ranked(draft)
            max_tokens = max(0, min(limit, self.num_speculative_tokens))
            if len(found) > max_tokens:
                found = found[:max_tokens]
            records.append(record)
            trees.append(tree)
            probabilities.append(found)
        offer = _Offer(
            probabilities,
            room,
            self.cost,
            num_waiting=num_waiting + len(room.prompts),
            num_speculative_tokens=self.num_speculative_tokens,
            verifies_all=self.verifies_all,
        )
        choice = offer.choose(num_rows=offer.max_rows if self.verifies_all else None)
        self.row_price = choice.row_price
        self._probe_credit = min(
            self._probe_credit + PROBE_SHARE * offer.plain_seconds, MAX_PROBE_CREDIT * offer.plain_seconds
        )
        num_rows = choice.num_rows
        if not self.verifies_all:
            if self._step % LEARN_STEPS == 0:
                choice = self._with_other_rows(offer, choice)
            num_rows = self._with_probes(offer, choice, records)
        return {
            sequence_id: ChosenDraft(tree, count)
            for (sequence_id, *_), tree, count in zip(offers, trees, num_rows, strict=True)
            if count
        }

    def observe_verdict(self, sequence_id: int, draft: DraftTree, accepted: Sequence[int]) -> None:
        """Learns how one draft went: the tokens of it that were accepted, from the root on."""
        record = self._records[draft.source].get(sequence_id) or self._start(sequence_id, draft.source)
        if self._step - record.last_step >= PROBE_STEPS:
            record.begin_anew()
        record.last_step = self._step
        if draft.parents:
            record.observe_tree(draft, accepted)
        else:
            record.observe_chain(len(draft.token_ids), len(accepted))

    def observe_step(self, seconds: float, *, num_rows: int, num_sequences: int, num_prompt_rows: int) -> None:
        """Learns what a step cost. One that computed prompts says little about drafts, and is left out."""
        self._step += 1
        if num_rows and not num_prompt_rows:
            self.cost.observe(num_sequences=num_sequences, num_rows=num_rows, step_seconds=seconds)

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended; an unknown one is fine."""
        for records in self._records.values():
            records.pop(sequence_id, None)

    def _with_other_rows(self, offer: _Offer, choice: RowChoice) -> RowChoice:
        """The choice, or one of another number of rows whose time is not known well, when there is credit for it.

        Of no rows for drafts, so that it is known what drafts win, or of a few more or less.
        """
        num_rows = offer.num_rows
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

    def _with_probes(self, offer: _Offer, choice: RowChoice, records: Sequence[AcceptanceRecord]) -> Sequence[int]:
        """The choice, and single tokens of sequences that had none for long: the longest first, as credit allows."""
        due = [
            (record.last_step, place)
            for place, (count, record) in enumerate(zip(choice.num_rows, records, strict=True))
            if not count and self._step - record.last_step >= PROBE_STEPS and offer.probabilities[place]
        ]
        if not due:
            return choice.num_rows
        num_rows = list(choice.num_rows)
        total = sum(num_rows)
        for _, place in sorted(due):
            if total == offer.max_rows:
                break
            price = offer.priced(offer.step_seconds[total + 1] - offer.step_seconds[total])
            if price >= self._probe_credit:
                break
            self._probe_credit -= price
            num_rows[place] = 1
            total += 1
        return num_rows

    def _start(self, sequence_id: int, source: str) -> AcceptanceRecord:
        """A new sequence is due for a trial at once, should its proposer be thought little of."""
        record = self._records[source][sequence_id] = AcceptanceRecord(
            self._sources[source], self.num_speculative_tokens, step=self._step - PROBE_STEPS
        )
        return record
