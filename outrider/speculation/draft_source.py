"""Statistics of a source of drafts: acceptance, gain, and the cost of asking."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from outrider.speculation.acceptance_record import Acceptance, AcceptanceRecord
from outrider.speculation.ask_cost import CallCost
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.trial_budget import TrialBudget

MIN_MARGINAL_GAIN = 0.05
"""Tokens per step that a draft node's drafts must gain over all other drafts, even if its messages cost less."""

MESSAGE_RATE = 0.1
"""Weight of each new step in the running means of the event loop's processor time."""

MESSAGE_FACTOR = 1.3
"""Processor time of all threads for a message, as a multiple of the event loop's: gRPC has threads of its own."""

MESSAGE_SEQUENCES = 6
"""Fixed cost of a step's messages, as a multiple of the cost that each sequence adds."""

FIRST_MARGINAL_GAIN, FIRST_GAINS = 1.0, 4
"""Assumed marginal gain of a new source, in tokens, and the number of observations that the assumption counts for."""

MARGINAL_GAIN_RATE, SOURCE_GAIN_RATE = 0.1, 0.01
"""Weights of each new observation in the running means of a sequence and of the source."""

TRIAL_STEPS, RARE_TRIALS, TRIAL_SHARE = 4, 4, 0.0065
"""Number of consecutive steps in which a draft node that adds nothing is asked. There are several such steps, because
its drafts arrive some steps later. If draft nodes add nothing to most sequences, there are `RARE_TRIALS` times fewer
trials, because drafts may be made on the target's own device. Messages of trials take at most the fraction
`TRIAL_SHARE` of the time.
"""

TREE_BONUS_RATE = 0.02
"""Weight of each new draft in the running mean of tree bonuses."""

CALL_SHARE = 0.005
"""Fraction of the time that trial calls to one proposer may take."""

FIRST_DRAFTS = 4
"""A new proposer drafts for one sequence at a time until it has made this many drafts, or one for every four sequences
of the batch if these are fewer, as its acceptance is unknown."""

FIRST_GAIN = 0.25
GAIN_RATE, MEAN_GAIN_RATE = 0.1, 0.01
"""Assumed gain of a cheap proposer's draft, in tokens, and the weights of each new draft in the running means of a
sequence and of the proposer."""

NUM_CHECKED_DRAFTS = 64
"""Number of verified drafts after which a proposer is judged, once."""

MIN_FIRST_ACCEPTED = 0.05
"""Minimum fraction of the `NUM_CHECKED_DRAFTS` drafts whose first token must be accepted. A head reaches 0.3 to 0.9, a
wrongly loaded one almost 0."""


MODEL_ITSELF = ""
"""The key of `DraftSource.priors` for sequences without an adapter."""
MAX_PRIORS = 256
"""Maximum number of adapters whose acceptance is remembered."""


class Priors:
    """Acceptance of a source's drafts over all sequences of one adapter, or of the model itself."""

    __slots__ = ("acceptance", "overall")

    def __init__(self) -> None:
        self.acceptance: defaultdict[int, Acceptance] = defaultdict(Acceptance)
        """Acceptance by grade."""
        self.overall = Acceptance()
        """Acceptance of drafts of all grades."""


class DraftSource:
    """Statistics of one source of drafts, a proposer or the draft nodes, over all sequences. Not thread-safe."""

    def __init__(self) -> None:
        self.priors = {MODEL_ITSELF: Priors()}
        """By fingerprint of the adapter, the one used last at the end."""
        self.cost = CallCost()
        self.tree_bonus = 0.0
        """Running mean of the difference, in tokens, between a finished draft's expected gain and the gain that was
        expected of a chain before the call. The difference comes from branches, and from the grade, which tells which
        tokens are worth their rows.
        """
        self.num_drafts = 0  # drafts asked for, whether or not any was found
        self.num_found = 0  # those that were found
        self._num_priced = 0  # number of drafts over which `tree_bonus` is the mean
        self.gain = FIRST_GAIN
        """Running mean of `SourceRecord.gain` over all sequences, with which a new one begins."""
        self.budget = TrialBudget(CALL_SHARE)
        self.is_cheap = False  # whether the last calls were chosen by what calls to the proposer gained
        self._trial: int | None = None  # the sequence under trial; reading its text may take several calls
        self.marginal_gain = FIRST_MARGINAL_GAIN
        """Running mean of `SourceRecord.marginal_gain` over all sequences, with which a new one begins."""
        self._num_gains = FIRST_GAINS  # number of values over which `marginal_gain` is the mean
        self.min_marginal_gain = MIN_MARGINAL_GAIN
        """What a draft node's messages cost, in tokens per step of each sequence that it drafts for."""
        self._loop_seconds = 0.0  # running mean of the event loop's time in a step without messages
        self._message_seconds = 0.0  # running mean of what the messages of one sequence add to it
        self.num_checked = 0  # drafts
        self.num_first_accepted = 0  # drafts whose first token was accepted
        self.records: dict[int, SourceRecord] = {}
        """Records by sequence."""

    @property
    def best_acceptance(self) -> float:
        """The acceptance of drafts of all grades, by the adapter that accepts most."""
        return max(priors.overall.mean for priors in self.priors.values())

    def priors_of(self, adapter: str) -> Priors:
        """Returns the acceptance in sequences of an adapter. Forgets the adapter that was used longest ago."""
        if adapter == MODEL_ITSELF:
            return self.priors[MODEL_ITSELF]
        priors = self.priors.pop(adapter, Priors())
        self.priors[adapter] = priors
        if len(self.priors) > MAX_PRIORS:
            del self.priors[next(key for key in self.priors if key != MODEL_ITSELF)]
        return priors

    @property
    def is_probably_misloaded(self) -> bool:
        """Whether the first `NUM_CHECKED_DRAFTS` drafts were almost never accepted. True only right after the last."""
        return (
            self.num_checked == NUM_CHECKED_DRAFTS and self.num_first_accepted < MIN_FIRST_ACCEPTED * NUM_CHECKED_DRAFTS
        )

    def mean_tokens(self, depth: int, row_price: float) -> float:
        """Returns how many tokens a draft of at most `depth` tokens gains on average, without those not worth a row."""
        acceptance = self.best_acceptance
        return sum([each for n in range(depth) if (each := acceptance ** (n + 1)) >= row_price])

    def gain_per_call(self, depth: int, row_price: float, num_sequences: int, token_rate: float) -> float:
        """Returns how many tokens per sequence a call gains on average, minus those that its duration costs.

        `token_rate`: tokens per second that the batch generates.
        """
        seconds = self.cost.seconds(depth, num_sequences * depth, 0)
        found = self.num_found / self.num_drafts
        return found * self.mean_tokens(depth, row_price) - token_rate * seconds / max(num_sequences, 1)

    def observe_tree_bonus(self, *, expected: float, found: float) -> None:
        """Updates `tree_bonus` with one draft, from two estimates of its gain in tokens.

        `expected`: gain of a chain, estimated before the proposer was called; `found`: gain of the finished draft.
        """
        self._num_priced += 1
        self.tree_bonus += max(TREE_BONUS_RATE, 1 / self._num_priced) * (found - expected - self.tree_bonus)

    def observe_messages(self, seconds: float, *, num_asked: int, token_rate: float) -> None:
        """Updates `min_marginal_gain` with one step.

        `seconds`: processor time of the event loop; `num_asked`: number of sequences that wanted drafts from draft
        nodes; `token_rate`: tokens per second that the batch would generate without drafts.
        """
        if not num_asked:
            self._loop_seconds += MESSAGE_RATE * (seconds - self._loop_seconds)
            return
        of_sequence = max(seconds - self._loop_seconds, 0.0) / (MESSAGE_SEQUENCES + num_asked)
        self._message_seconds += MESSAGE_RATE * (of_sequence - self._message_seconds)
        tokens = MESSAGE_FACTOR * self._message_seconds * token_rate
        num_sharing = sum([record.marginal_gain > tokens for record in self.records.values()])
        self.min_marginal_gain = max(tokens * (1.0 + MESSAGE_SEQUENCES / max(num_sharing, 1)), MIN_MARGINAL_GAIN)

    def observe_marginal_gain(self, tokens: float) -> None:
        """Updates `marginal_gain` with one sequence's draft in one step."""
        self._num_gains += 1
        self.marginal_gain += max(SOURCE_GAIN_RATE, 1 / self._num_gains) * (tokens - self.marginal_gain)

    def first_trial(self, keys: Sequence[int]) -> Sequence[int]:
        """Returns the one sequence, the first of `keys`, for which the first call shows what a call costs.

        If it takes several calls to read the text, they are all made for this sequence.
        """
        if self._trial not in keys:
            self._trial = next(iter(keys), None)
        return () if self._trial is None else (self._trial,)

    def add_trial(self, asked: dict[int, int], num_unread: Mapping[int, int], *, before: int) -> None:
        """Adds one token of one sequence to `asked` as a trial, if credit allows.

        Only sequences whose last call was at step `before` or earlier are tried. Among those that the credit pays for,
        the one whose last call was earliest is chosen. If the credit pays for none of them, the cheapest one is tried
        as soon as the debt that its trial would leave is within the limit, which grows up to that of `MAX_DEBT`. The
        next trial comes when the debt is repaid. A trial continues until the text has been read.

        `num_unread`: number of unread tokens, for each sequence that may be tried.
        """
        if self._trial not in num_unread or self._trial in asked:
            self._trial = self._next_trial(asked, num_unread, before=before)
        if self._trial is not None:
            asked[self._trial] = 1

    def charge_trial(self, asked: Mapping[int, int], *, num_read: int) -> None:
        """Charges the credit with the cost of the trial, if there was one.

        `asked`: the sequences whose text has been read; `num_read`: tokens of all sequences that the call read.
        """
        if self._trial is None:
            return
        if self._num_priced:  # the first trial is free
            self.budget.credit -= self.cost.seconds(1 if asked.keys() <= {self._trial} else 0, 1, num_read)
        if self._trial in asked:
            self._trial = None

    def _next_trial(self, asked: Mapping[int, int], num_unread: Mapping[int, int], *, before: int) -> int | None:
        records = self.records
        seconds = {
            key: self.cost.seconds(0 if asked else 1, 1, num_unread[key])
            for key in num_unread.keys() - asked.keys()
            if records[key].last_call <= before
        }
        paid = [key for key, each in seconds.items() if each <= self.budget.credit]
        if paid:
            return min(paid, key=lambda key: (records[key].last_call, key))
        cheapest = min(seconds, key=lambda key: (seconds[key], key), default=None)
        return cheapest if cheapest is not None and self.budget.allows_debt(seconds[cheapest]) else None


class SourceRecord:
    """The acceptance of a source's drafts in one sequence, by grade. Not thread-safe."""

    __slots__ = (
        "_begun",
        "_by_grade",
        "_num_positions",
        "_priors",
        "_source",
        "_tried_at",
        "gain",
        "last_call",
        "marginal_gain",
        "overall",
    )

    def __init__(self, source: DraftSource, num_positions: int, *, step: int, adapter: str = MODEL_ITSELF) -> None:
        """`step`: the step that counts as the last one in which a draft was verified or asked for. `adapter`: the
        fingerprint of the sequence's adapter.
        """
        self._source = source
        self._priors = source.priors_of(adapter)
        self._num_positions = num_positions
        self._begun = step
        self._tried_at = -math.inf  # step in which the last trial began
        self._by_grade: dict[int, AcceptanceRecord] = {}
        self.overall = AcceptanceRecord(self._priors.overall, num_positions, step=step)
        """The record of drafts of all grades, used before a draft is made, when its grade is not known yet."""
        self.last_call = step
        self.gain = source.gain
        """Running mean of the gain of a cheap proposer's drafts, in tokens."""
        self.marginal_gain = source.marginal_gain
        """Running mean of the tokens that the source's drafts were expected to gain over the best other draft."""

    def of(self, grade: int) -> AcceptanceRecord:
        """Returns the record of drafts of the grade."""
        record = self._by_grade.get(grade)
        if record is None:
            record = AcceptanceRecord(self._priors.acceptance[grade], self._num_positions, step=self._begun)
            self._by_grade[grade] = record
        return record

    def observe(
        self, draft: DraftTree, accepted: Sequence[int], num_known: int, *, step: int, reset_after: int
    ) -> None:
        """Learns from a draft. For `accepted` and `num_known` see `DraftController.observe_verdict`.

        `reset_after`: number of steps without a verdict after which an accepted draft means that the text has changed
        in kind.
        """
        if self._priors is self._source.priors[MODEL_ITSELF]:  # drafters are not made for adapters
            self._source.num_checked += 1
            self._source.num_first_accepted += bool(accepted)
        decisions = draft.decisions(accepted, num_known)
        for record in (self.of(draft.grade), self.overall):
            if accepted and step - record.last_step >= reset_after:
                record.reset()
            record.last_step = step
            record.observe(*decisions)

    def observe_marginal_gain(self, tokens: float) -> None:
        """Learns from a step in which the source was asked. `tokens` is 0 if its drafts were no better than others."""
        self.marginal_gain += MARGINAL_GAIN_RATE * (tokens - self.marginal_gain)
        self._source.observe_marginal_gain(tokens)

    def observe_gain(self, tokens: float) -> None:
        """Learns what a call to a cheap proposer is expected to gain, minus the price of rows."""
        self.gain += GAIN_RATE * (tokens - self.gain)
        self._source.gain += MEAN_GAIN_RATE * (tokens - self._source.gain)

    @property
    def adds_nothing(self) -> bool:
        """Whether the source's drafts gain less than its messages cost."""
        return self.marginal_gain < self._source.min_marginal_gain

    def is_trial(self, step: int, interval: int) -> bool:
        """Returns whether a draft node that adds nothing to the sequence is asked in this step.

        It is asked in `TRIAL_STEPS` of `interval` steps of the sequence, or of more: see `RARE_TRIALS`, `TRIAL_SHARE`.
        """
        source = self._source
        if source.marginal_gain < source.min_marginal_gain:
            interval *= RARE_TRIALS
        if step - self._tried_at >= max(interval, TRIAL_STEPS * source.min_marginal_gain / TRIAL_SHARE):
            self._tried_at = step
        return step - self._tried_at < TRIAL_STEPS

    def best(self) -> AcceptanceRecord:
        """Returns the record of the grade with the highest acceptance."""
        grades = self._priors.acceptance
        if len(grades) < 2:
            return self.of(next(iter(grades), 0))
        return max(map(self.of, grades), key=lambda record: record.chain[0])
