"""How many draft tokens are worth verifying, sequence by sequence.

A draft token costs a row, and a row costs time that every sequence of the batch waits
for. It pays if the tokens it wins per added second are more than the step makes per
second without it. Acceptance is counted over the sequence's last drafts, the cost of a
row is measured while serving, and a sequence that stopped paying is tried again later. Drafts of
different sources are counted apart: a bad one does not stop a good one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.speculation.draft_tree import DraftSource
from outrider.speculation.step_cost import StepCostModel

WINDOW = 16
RETRY_STEPS = 32

PRIOR_ACCEPTANCE = 0.8
"""What a new sequence is taken to accept of each next token: it starts with long drafts."""

DOUBTFUL_ACCEPTANCE = 0.5
"""The same for a sequence that is tried again after its drafts had stopped paying."""

PRIOR_TOKENS = 3.0
"""How many draft tokens that assumption weighs."""

POSITION_TOKENS = 2.0
"""How many draft tokens a sequence's overall acceptance weighs in that of one position."""

NEW_CREDIT = 1.0
"""A new sequence's drafts may lose the time of so many tokens before its window is full."""

TRIAL_CREDIT = 0.5
"""The same for a sequence that is tried again; its first draft may cost half of it."""

SMOOTHING = 0.1


@dataclass(slots=True)
class _Record:
    """How a sequence's last drafts went."""

    verdicts: deque[tuple[int, int]] = field(default_factory=deque)  # (drafted, accepted)
    prior_acceptance: float = PRIOR_ACCEPTANCE
    credit: float = NEW_CREDIT
    off_since: int | None = None  # step at which drafting stopped paying
    acceptance: list[float] | None = None  # of the positions looked at; None: verdicts have changed
    # Of these verdicts, so that a new one costs no walk over all of them.
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0  # drafts that were not accepted whole
    accepted_by_length: list[int] = field(default_factory=list)  # verdicts by number of accepted tokens
    rejected_by_length: list[int] = field(default_factory=list)  # those of them whose next draft token was rejected

    def add(self, num_draft: int, num_accepted: int) -> None:
        """One verdict more; the oldest goes when the window is full."""
        if len(self.verdicts) == WINDOW:
            self._tally(*self.verdicts.popleft(), -1)
        self.verdicts.append((num_draft, num_accepted))
        self._tally(num_draft, num_accepted, 1)
        self.acceptance = None

    def clear(self) -> None:
        self.verdicts.clear()
        self.num_draft_tokens = self.num_accepted = self.num_rejected = 0
        self.accepted_by_length, self.rejected_by_length = [], []

    def _tally(self, num_draft: int, num_accepted: int, sign: int) -> None:
        missing = num_accepted + 1 - len(self.accepted_by_length)
        if missing > 0:
            self.accepted_by_length += [0] * missing
            self.rejected_by_length += [0] * missing
        self.num_draft_tokens += sign * num_draft
        self.num_accepted += sign * num_accepted
        self.accepted_by_length[num_accepted] += sign
        if num_accepted < num_draft:
            self.num_rejected += sign
            self.rejected_by_length[num_accepted] += sign

    def balance(self, row_price: float) -> float:
        """Tokens won by the last drafts, less what their rows cost."""
        return self.num_accepted - row_price * self.num_draft_tokens

    def acceptance_by_position(self, num_positions: int) -> list[float]:
        """Chance of each draft token to be accepted once those before it are.

        The product-limit estimate (Kaplan and Meier 1958): a draft that was cut short
        says nothing about the positions after. Each position leans on the sequence's
        overall acceptance, and that on the prior.
        """
        num_decided = self.num_accepted + self.num_rejected
        overall = (self.num_accepted + PRIOR_TOKENS * self.prior_acceptance) / (num_decided + PRIOR_TOKENS)
        found: list[float] = []
        num_kept = len(self.verdicts)
        for position in range(num_positions):
            num_rejected = 0
            if position < len(self.accepted_by_length):
                num_kept -= self.accepted_by_length[position]  # those that accepted more
                num_rejected = self.rejected_by_length[position]
            else:
                num_kept = 0
            num_reached = num_kept + num_rejected
            found.append((num_kept + POSITION_TOKENS * overall) / (num_reached + POSITION_TOKENS))
        return found


@dataclass(frozen=True, slots=True)
class _Load:
    """Running means of one step of the batch."""

    num_sequences: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted: float = 0.0


@dataclass(slots=True)
class _Tally:
    """Verdicts since the last step was observed."""

    num_draft_tokens: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class DraftPolicy:
    """Decides each sequence's number of draft tokens, by marginal throughput.

    Order of calls in a step: `num_draft_tokens` for each sequence, the forward,
    `observe_verdict` for each sequence that was drafted for, `observe_step` once.
    Not thread-safe: the engine thread's.
    """

    num_speculative_tokens: int
    cost: StepCostModel = field(default_factory=StepCostModel)
    _records: dict[int, dict[DraftSource, _Record]] = field(default_factory=dict)
    _step: int = 0
    _load: _Load = field(default_factory=_Load)
    _tally: _Tally = field(default_factory=_Tally)
    _row_price: float = 0.0

    def num_draft_tokens(self, sequence_id: int, *, maximum: int, source: DraftSource = DraftSource.DRAFT_NODE) -> int:
        """How many draft tokens from there to verify for this sequence in the next step, 0 to `maximum`."""
        maximum = min(maximum, self.num_speculative_tokens)
        if maximum <= 0:
            return 0
        record = self._record(sequence_id, source)
        if record.off_since is None:
            return self._best_length(record, maximum)
        if self._step - record.off_since < RETRY_STEPS:
            return 0
        row_price = self._row_price
        return maximum if row_price <= 0.0 else max(1, min(maximum, int(TRIAL_CREDIT / row_price / 2)))

    def observe_verdict(
        self,
        sequence_id: int,
        num_draft: int,
        num_accepted: int,
        *,
        source: DraftSource = DraftSource.DRAFT_NODE,
    ) -> None:
        """Learns how one draft went; a step without a draft says nothing."""
        if num_draft <= 0:
            return
        self._tally.num_draft_tokens += num_draft
        self._tally.num_accepted += num_accepted
        record = self._record(sequence_id, source)
        if record.off_since is not None:  # a trial: what came before it no longer counts
            record.clear()
            record.prior_acceptance = DOUBTFUL_ACCEPTANCE
            record.credit = TRIAL_CREDIT
            record.off_since = None
        record.add(num_draft, num_accepted)
        credit = record.credit if len(record.verdicts) < WINDOW else 0.0
        if record.balance(self._row_price) < -credit:
            record.off_since = self._step

    def observe_step(
        self, step_seconds: float, num_rows: int, num_sequences: int, *, num_prefill_rows: int = 0
    ) -> None:
        """Learns what a step cost.

        `num_rows` counts all rows, `num_prefill_rows` those of them that computed a prompt;
        such steps say little about draft rows and are left out of the cost.
        """
        self._step += 1
        if num_prefill_rows == 0 and num_rows > 0:
            self.cost.observe(num_rows=num_rows, step_seconds=step_seconds)
        tally, load = self._tally, self._load
        weight = SMOOTHING if load.num_sequences > 0.0 else 1.0
        self._load = _Load(
            num_sequences=float(num_sequences),
            num_draft_tokens=load.num_draft_tokens + weight * (tally.num_draft_tokens - load.num_draft_tokens),
            num_accepted=load.num_accepted + weight * (tally.num_accepted - load.num_accepted),
        )
        self._tally = _Tally()
        self._row_price = self._price_of_a_row()

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended; an unknown one is fine."""
        self._records.pop(sequence_id, None)

    def row_price(self) -> float:
        """Tokens that the others would make in the time of one more row, by the last step; 0 when unknown."""
        return self._row_price

    def _price_of_a_row(self) -> float:
        load = self._load
        if load.num_sequences <= 0.0:
            return 0.0
        others = 1.0 - 1.0 / load.num_sequences  # this sequence's own drafts are the ones in question
        seconds = self.cost.seconds(load.num_sequences + others * load.num_draft_tokens)
        if seconds <= 0.0:
            return 0.0
        return self.cost.seconds_per_row * (load.num_sequences + others * load.num_accepted) / seconds

    def _record(self, sequence_id: int, source: DraftSource) -> _Record:
        records = self._records.setdefault(sequence_id, {})
        record = records.get(source)
        if record is None:
            record = records[source] = _Record()
        return record

    def _best_length(self, record: _Record, maximum: int) -> int:
        """The length whose expected accepted tokens exceed the price of its rows by most; at least 1."""
        row_price = self._row_price
        best, gain, best_gain, survival = 1, 0.0, float("-inf"), 1.0
        if record.acceptance is None or len(record.acceptance) < maximum:
            record.acceptance = record.acceptance_by_position(maximum)
        for length, acceptance in enumerate(record.acceptance[:maximum], start=1):
            survival *= acceptance
            gain += survival - row_price
            if gain > best_gain:
                best, best_gain = length, gain
        return best
