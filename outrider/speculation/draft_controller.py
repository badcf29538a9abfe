"""Decides which proposers draft for a batch, and how many draft tokens of each sequence a step verifies.

A draft token costs a row, and all sequences of the batch wait for the time that a row takes. The controller estimates
how likely each draft token is (`AcceptanceRecord`, by sequence, proposer, grade and position) and how long steps take
(`StepCostModel`), and gives rows to the tokens that gain most (`StepOffer.choose`), or to none. Now and then a
sequence without rows is tried again with a single token, for a small share of the time.

A call to a proposer in this process takes time as well (`CallCost`). It is made for those sequences whose expected gain
exceeds their share of that time (`choose_calls`), and now and then for a trial.

A draft that was drawn at random for the ratio test of rejection sampling is valued by what was expected before the
draw, because the test is exact only if no drawn token influences whether this draft or another one is verified.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.engine.scheduler import StepReservation
from outrider.speculation.ask_cost import CHEAP_SHARE, Candidate, choose_calls, expected_gain
from outrider.speculation.draft_source import FIRST_DRAFTS, MODEL_ITSELF, DraftSource, SourceRecord
from outrider.speculation.draft_tree import DraftTree, RankedDraft
from outrider.speculation.row_choice import RowChoice, StepOffer
from outrider.speculation.step_cost import StepCostModel
from outrider.speculation.trial_budget import TrialBudget

PROBE_STEPS = 32
"""Steps without a verified draft, or without a call to a proposer, after which a sequence may be tried again."""

CHEAP_PROBE_STEPS = 8
"""The same as `PROBE_STEPS`, for a proposer that costs almost nothing."""
FEW_SEQUENCES = 8
"""Number of sequences at which trial calls have half of the usual time, as each promises less the more there are."""

SPEEDUP_STEPS = 32
"""Number of steps over which the batch's speedup is averaged. The value of time is computed from this average."""

ROW_SHARE = 0.0025
"""Fraction of the time that trials of rows may take."""

LEARN_STEPS, MAX_LEARN_SHARE = 4, 0.2
"""One of this many steps may use a number of rows other than the best one, to learn how long such a step takes, unless
more than this fraction of a step's duration would be lost."""

MIN_GAIN = 0.01
"""Tokens per sequence that drafts, or calls, must be expected to gain, as the best of many estimates is too high."""
MIN_SHARE_TO_ASK = 0.5
"""A draft is asked for if the probability of its first token is at least this fraction of the current row price."""


@dataclass(slots=True)
class DraftController:
    """Decides which draft tokens are asked for and which are verified. Engine thread only.

    Order of calls in a step: `rank` for each draft as it comes, `choose_calls` and `observe_calls` for each proposer of
    this process, the cheapest first, `observe_marginal_gain` for draft nodes, `choose` for the best drafts (unless the
    step is launched ahead), the forward, `observe_verdict` for each sequence with a verified draft, `observe_committed`
    for other drafts, `observe_step` once. `num_wanted` is the number of tokens to ask draft nodes for.
    """

    num_speculative_tokens: int
    cost: StepCostModel = field(default_factory=StepCostModel)
    verifies_all: bool = False  # verifies all draft tokens that fit, at any price
    row_price: float = 0.0  # lowest probability at which a draft token would have paid for its row in the last step
    _sources: defaultdict[str, DraftSource] = field(default_factory=lambda: defaultdict(DraftSource))
    _adapters: dict[int, str] = field(default_factory=dict)  # fingerprints, by sequence; absent: the model itself
    _step: int = 0
    _num_waiting: int = 0  # prompts that waited in the last step
    _token_rate: float = 0.0  # tokens per second that the batch was expected to generate in the last step
    _plain_seconds: float = 0.0  # expected duration of the last step if it had no drafts; 0: unknown
    _asked_seconds: float = 0.0  # time spent on asking for drafts since the last choice
    _speedup: float = 1.0  # running mean of the expected token rate divided by that of plain decoding
    _budget: TrialBudget = field(default_factory=lambda: TrialBudget(ROW_SHARE))

    def num_wanted(self, sequence_id: int, maximum: int, source: str) -> int:
        """Returns how many draft tokens of a draft node may be worth verifying in the next step, 0 to `maximum`.

        A message takes processor time on both sides, so a source that adds nothing is asked only occasionally.
        """
        maximum = min(maximum, self.num_speculative_tokens)
        if maximum <= 0 or self.verifies_all:
            return max(maximum, 0)
        found = self._record(sequence_id, source)
        min_probability = MIN_SHARE_TO_ASK * self.row_price
        if found.adds_nothing and not found.is_trial(self._step, PROBE_STEPS):
            return 0
        chain = found.best().chain
        if chain[0] < min_probability:
            return int(self._step - found.overall.last_step >= PROBE_STEPS)
        if chain[maximum - 1] >= min_probability:
            return maximum
        return sum(each >= min_probability for each in chain[:maximum])

    def set_adapter(self, sequence_id: int, fingerprint: str) -> None:
        """Records a new sequence's adapter: what other adapters' sequences accept says little about this one."""
        self._adapters[sequence_id] = fingerprint

    def source(self, name: str) -> DraftSource:
        """Returns the statistics of a proposer, or of the draft nodes."""
        return self._sources[name]

    def is_cheap(self, source: str) -> bool:
        """Returns whether a call to the proposer costs almost nothing."""
        return self._sources[source].cost.is_cheap(self._plain_seconds or float("inf"))

    def rank(self, sequence_id: int, draft: DraftTree, limit: int) -> RankedDraft:
        """Orders the tokens of a draft by the probability that the text goes through them.

        There is one probability for each token that may be verified, at most `limit`; a drawn draft has one for each
        token that it could have had, whatever its actual length.
        """
        record = self._record(sequence_id, draft.source).of(draft.grade)
        tree, found = (draft, record.chain) if draft.was_drawn else record.rank(draft)
        probabilities = found[: max(0, min(limit, self.num_speculative_tokens))]
        return RankedDraft(tree, probabilities, expected_gain(probabilities, self.row_price))

    def choose_calls(
        self, source: str, wanted: Mapping[int, int], drafts: Mapping[int, RankedDraft], num_unread: Mapping[int, int]
    ) -> dict[int, int]:
        """Decides for which sequences to ask a proposer of this process now, and for how many tokens.

        Args:
            source: the proposer's name.
            wanted: the maximum number of draft tokens that may be verified, for each sequence of the batch.
            drafts: the best draft found so far, by sequence.
            num_unread: how many tokens the proposer has not read, by sequence id.

        Returns:
            Numbers of tokens by sequence id; other sequences are absent.
        """
        known, num_tokens = self._sources[source], self.num_speculative_tokens
        records = {key: self._record(key, source) for key, limit in wanted.items() if limit > 0}
        known.is_cheap = bool(known.num_drafts and self._plain_seconds and wanted)
        if known.is_cheap:
            seconds = known.cost.seconds(num_tokens, num_tokens * len(wanted), sum(num_unread.values()))
            known.is_cheap = seconds <= CHEAP_SHARE * self._plain_seconds
        if known.is_cheap:
            asked = self._ask_cheap(records, wanted, seconds)
        else:
            asked = self._choose_asked(known, records, wanted, drafts, num_unread)
        for sequence_id in asked:
            records[sequence_id].last_call = self._step
        return asked

    def min_reach(self, source: str, num_asked: int) -> float:
        """Returns the path probability below which a draft ends, because drafting one more token would not pay off.

        `num_asked`: number of sequences in the same call.
        """
        if not num_asked:
            return 0.0
        known = self._sources[source]
        seconds = known.cost.seconds(1, num_asked, 0) - known.cost.seconds(0, 0, 0)
        return (self.row_price + self._token_rate * seconds / num_asked) / known.best_acceptance

    def observe_calls(
        self,
        source: str,
        asked: Mapping[int, int],
        found: Mapping[int, RankedDraft],
        *,
        seconds: float,
        num_read: int | None,
    ) -> None:
        """Learns from a proposer's drafts and from the duration of its calls.

        Args:
            source: the proposer's name.
            asked: number of tokens asked for, by sequence id; sequences whose text is still being read are absent.
            found: the proposer's drafts, by sequence id.
            seconds: the total duration of the proposer's calls in this step.
            num_read: number of committed tokens that these calls read; None: they also read prompts of other sequences.
        """
        known = self._sources[source]
        if any(draft.tree.was_drawn for draft in found.values()):
            # The expected duration counts, because the measured one depends on what was drawn.
            self._asked_seconds += known.cost.seconds(
                max(asked.values(), default=0), sum(asked.values()), num_read or 0
            )
        else:
            self._asked_seconds += seconds
        if num_read is None or not (asked or num_read):
            return
        depths = [found[key].tree.depth if key in found else number for key, number in asked.items()]
        known.cost.observe(seconds, depth=max(depths, default=1), num_tokens=sum(depths), num_unread=num_read)
        known.num_drafts += len(asked)
        known.num_found += len(found)
        if known.is_cheap:
            for sequence_id in asked:
                known.records[sequence_id].observe_gain(found[sequence_id].gain if sequence_id in found else 0.0)
            return
        known.charge_trial(asked, num_read=num_read)
        for (sequence_id, number), depth in zip(asked.items(), depths, strict=True):
            draft, chain = found.get(sequence_id), known.records[sequence_id].overall.chain
            if draft is not None and draft.tree.was_drawn:
                gain, chain = expected_gain(draft.probabilities[:number], self.row_price), chain[:number]
            else:
                gain, chain = 0.0 if draft is None else draft.gain, chain[:depth]
            known.observe_tree_bonus(expected=expected_gain(chain, self.row_price), found=gain)

    def observe_marginal_gain(self, source: str, drafts: Mapping[int, Sequence[RankedDraft]]) -> None:
        """Learns how many tokens a source's drafts were expected to gain over the best draft of any other source.

        `drafts`: the drafts of all sources, by id of each sequence for which this source was asked. A proposer that was
        not asked, because there was a draft, counts with its mean gain per call.
        """
        depth, price = self.num_speculative_tokens, self.row_price
        mean = self._sources[source].mean_tokens(depth, price) or float("inf")
        proposers = [each for each in self._sources.values() if each.num_drafts]
        shares = [
            (each.records, each.gain_per_call(depth, price, len(drafts), self._token_rate) / mean) for each in proposers
        ]
        for sequence_id, found in drafts.items():
            tokens = {each.tree.source: sum([one for one in each.probabilities if one >= price]) for each in found}
            own = tokens.pop(source, 0.0)
            other = max(tokens.values(), default=0.0)
            for records, share in shares:
                if sequence_id in records and records[sequence_id].last_call < self._step:
                    other = max(other, own * share)
            self._record(sequence_id, source).observe_marginal_gain(max(own - other, 0.0))

    def observe_messages(self, source: str, seconds: float, *, num_asked: int, num_sequences: int) -> None:
        """Learns what the messages of draft nodes cost: see `DraftSource.observe_messages`."""
        if self._plain_seconds:
            token_rate = (num_sequences + self._num_waiting) / self._plain_seconds  # without drafts
            self._sources[source].observe_messages(seconds, num_asked=num_asked, token_rate=token_rate)

    def choose(
        self,
        drafts: Mapping[int, RankedDraft],
        room: StepReservation,
        *,
        num_waiting: int = 0,
        judged: Container[int] = (),
    ) -> dict[int, int]:
        """Decides how many of each draft's first tokens are verified.

        Args:
            drafts: the best draft of each sequence of the step, by sequence id.
            room: what the scheduler leaves for drafts.
            num_waiting: number of prompts that wait for the step's processors, without those computed in the step.
            judged: sequences that need no trials, because unverified drafts are judged by the committed tokens.

        Returns:
            Numbers of tokens by sequence id; sequences without any are absent.
        """
        num_sequences = len(room.sequences)
        if self.num_speculative_tokens <= 0 or not num_sequences:
            return {}
        self._num_waiting = num_waiting + len(room.prompts)
        num_possible = min(room.max_draft_rows, num_sequences * self.num_speculative_tokens)
        step_seconds = self.cost.seconds(num_sequences, room.num_rows, num_more=num_possible)
        probabilities = [draft.probabilities for draft in drafts.values()]
        offer = StepOffer(
            drafts=probabilities,
            step_seconds=[each + self._asked_seconds for each in step_seconds],  # with the time spent asking
            max_rows=min(sum(map(len, probabilities)), num_possible, self._max_explored_rows(room)),
            num_sequences=num_sequences,
            num_waiting=self._num_waiting,
            min_gain=MIN_GAIN * num_sequences,
        )
        plain_seconds = step_seconds[0]
        self._asked_seconds = 0.0
        num_rows = offer.max_rows if self.verifies_all else None
        if self.cost.is_known:
            self._plain_seconds = plain_seconds
            self._budget.earn(offer.priced(plain_seconds))
            for source in self._sources.values():
                source.budget.earn(plain_seconds / (1.0 + num_sequences / FEW_SEQUENCES))
        elif not self.verifies_all:
            num_rows = 0
        choice = offer.choose(num_rows=num_rows)
        self.row_price = 0.0 if self.verifies_all else choice.row_price
        if not room.prompts:
            speedup = choice.expected_tokens / choice.expected_seconds * plain_seconds / num_sequences
            self._speedup += (max(speedup, 1.0) - self._speedup) / SPEEDUP_STEPS
        counts = choice.num_rows
        if self.cost.is_known and not self.verifies_all:
            if self._step % LEARN_STEPS == 0:
                choice = self._with_other_rows(offer, choice, room.num_rows)
            tried = [
                (self._record(key, tree.source).of(tree.grade).last_step, place)
                for place, (key, (tree, *_)) in enumerate(drafts.items())
                if key not in judged
            ]
            due = [place for step, place in sorted(tried) if step <= self._step - PROBE_STEPS]
            counts = offer.with_trials(choice, due, self._budget)
        return {key: min(count, len(drafts[key].tree)) for key, count in zip(drafts, counts, strict=True) if count}

    def observe_verdict(
        self, sequence_id: int, draft: DraftTree, accepted: Sequence[int], num_known: int = sys.maxsize
    ) -> None:
        """Learns which tokens of a draft were accepted: those with the indices `accepted`, from the root on.

        `num_known`: number of known tokens after the draft's prefix. Deeper tokens of the draft are not judged.
        """
        record = self._record(sequence_id, draft.source)
        record.observe(draft, accepted, num_known, step=self._step, reset_after=PROBE_STEPS)

    def observe_committed(self, sequence_id: int, draft: DraftTree, token_ids: Sequence[int]) -> None:
        """Learns from a draft that was not verified, by comparing it with the tokens that were committed instead.

        This is valid for coupled sampling, where the token of a position does not depend on drafts.
        """
        self.observe_verdict(sequence_id, draft, draft.path_of(token_ids), len(token_ids))

    def observe_step(
        self, seconds: float, *, num_rows: int, num_sequences: int, num_prompt_rows: int, is_ahead: bool = False
    ) -> None:
        """Learns the duration of a step. Steps that computed prompts are ignored, as they say little about drafts."""
        self._step += 1
        if num_rows and not num_prompt_rows:
            self.cost.observe(num_sequences=num_sequences, num_rows=num_rows, step_seconds=seconds, is_ahead=is_ahead)

    def forget(self, sequence_id: int) -> None:
        """Drops the statistics of an ended sequence. Does nothing if the sequence is unknown."""
        self._adapters.pop(sequence_id, None)
        for source in self._sources.values():
            source.records.pop(sequence_id, None)

    def _ask_cheap(
        self, records: Mapping[int, SourceRecord], wanted: Mapping[int, int], seconds: float
    ) -> dict[int, int]:
        """Asks for the sequences in which recent drafts gained more than their share of a call, of `seconds`, costs."""
        min_gain, last_step = self._value_of_time(len(wanted)) * seconds / len(wanted), self._step - CHEAP_PROBE_STEPS
        return {
            key: min(wanted[key], self.num_speculative_tokens)
            for key, record in records.items()
            if record.gain >= min_gain or record.last_call <= last_step
        }

    def _choose_asked(
        self,
        known: DraftSource,
        records: Mapping[int, SourceRecord],
        wanted: Mapping[int, int],
        drafts: Mapping[int, RankedDraft],
        num_unread: Mapping[int, int],
    ) -> dict[int, int]:
        """Chooses sequences by expected gain and expected duration, for a proposer whose calls are not cheap."""
        rate = self._token_rate = self._value_of_time(len(wanted))
        keys, least = list(records), MIN_GAIN * len(wanted)
        if not self.verifies_all:
            if known.num_drafts < min(FIRST_DRAFTS, len(wanted) / 4):
                keys = sorted(keys, key=num_unread.__getitem__)[:1]
            if not known.num_drafts:
                return dict.fromkeys(known.first_trial(keys), 1)
            if not self._plain_seconds:
                return {}
        candidates: list[Candidate] = []
        for key in keys:
            gain, chain = drafts[key].gain if key in drafts else 0.0, records[key].overall.chain[: wanted[key]]
            candidates.append(Candidate(key, chain, gain, num_unread[key], known.tree_bonus))
        asked = choose_calls(candidates, known.cost, token_rate=rate, row_price=self.row_price, min_gain=least)
        known.add_trial(asked, {key: num_unread[key] for key in keys}, before=self._step - PROBE_STEPS)
        return asked

    def _value_of_time(self, num_sequences: int) -> float:
        """Returns tokens per second of the batch, with waiting prompts like sequences; 0: unknown, or of no account."""
        if self.verifies_all or not self._plain_seconds:
            return 0.0
        return self._speedup * (num_sequences + self._num_waiting) / self._plain_seconds

    def _max_explored_rows(self, room: StepReservation) -> int:
        """Returns the maximum number of draft rows with which the step's duration can still be estimated."""
        max_rows = None if room.prompts or self.verifies_all else self.cost.max_explored_rows()
        return room.max_draft_rows if max_rows is None else max(0, max_rows - room.num_rows)

    def _with_other_rows(self, offer: StepOffer, choice: RowChoice, num_rows: int) -> RowChoice:
        """Returns the choice or, if credit allows, one with another number of rows whose duration is hardly known.

        The other choice has either no draft rows, to measure what drafts gain, or a few rows more or less.
        `num_rows`: rows of the step without drafts.
        """
        num_best = sum(choice.num_rows)
        plain = None if self.cost.is_known_at(num_rows) else num_rows
        for total in (plain, *self.cost.unknown_near(num_rows + num_best)):
            if total is None or not 0 <= total - num_rows <= offer.max_rows or total - num_rows == num_best:
                continue
            other = offer.choose(num_rows=total - num_rows)
            won_tokens = other.expected_tokens - choice.expected_tokens
            more_seconds = other.expected_seconds - choice.expected_seconds
            lost_seconds = offer.priced(more_seconds) - won_tokens * choice.token_seconds
            if lost_seconds < min(self._budget.credit, MAX_LEARN_SHARE * self._plain_seconds):
                self._budget.credit -= max(lost_seconds, 0.0)
                return other
        return choice

    def _record(self, sequence_id: int, source: str) -> SourceRecord:
        """Returns the record of a sequence. A new record is due for a trial at once."""
        known = self._sources[source]
        record = known.records.get(sequence_id)
        if record is None:
            adapter = self._adapters.get(sequence_id, MODEL_ITSELF)
            record = SourceRecord(known, self.num_speculative_tokens, step=self._step - PROBE_STEPS, adapter=adapter)
            known.records[sequence_id] = record
        return record
