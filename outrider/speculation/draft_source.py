"""What is known of a source of drafts: how often they are accepted, what they gain, and what asking for them costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from outrider.speculation.acceptance_record import Acceptance, AcceptanceRecord
from outrider.speculation.ask_cost import AskCost
from outrider.speculation.draft_tree import DraftTree

MIN_MARGINAL_GAIN = 0.05
"""Accepted tokens a step that drafts of a draft node must add to those of others: about the cost of its messages."""

FIRST_MARGINAL_GAIN = 1.0
MARGINAL_GAIN_RATE = 0.1
"""The marginal gain in tokens that is assumed of a new source, and the weight of each step in which it is asked."""

TREE_BONUS_RATE = 0.02
"""The weight of a new draft in the mean of tree bonuses."""

DEBT_FACTOR = 4.0
DEBT_GROWTH = 0.001
"""While credit for trials is full, the debt that a trial may leave grows in each step, by so many times the time that
would have been added and by this share of itself. So a long text is read for a trial late, but in bounded time."""


NUM_JUDGED = 64
"""Drafts of a proposer after which it is judged, once."""

MIN_BEGUN = 0.05
"""Share of them whose first token must be accepted. A head has 0.3 to 0.9; one that was loaded wrongly has almost 0."""


class DraftSource:
    """What is known of one source of drafts, a proposer or the draft nodes, over all sequences. Not thread-safe."""

    def __init__(self) -> None:
        self.acceptance: defaultdict[int, Acceptance] = defaultdict(Acceptance)
        """Acceptance by grade."""
        self.overall = Acceptance()
        """Acceptance of drafts of all grades."""
        self.cost = AskCost()
        self.tree_bonus = 0.0
        """The mean gain of a draft, in tokens, beyond what was expected of its chain before it was made: a draft has
        branches, and its grade tells which tokens are worth their rows."""
        self._num_found = 0  # drafts of which `tree_bonus` is the mean
        self._credit = 0.0  # seconds for trials; negative after a trial that took more
        self._max_debt = 0.0  # seconds that the next trial may leave
        self._trial: int | None = None  # the sequence that is being tried: reading its text may take several calls
        self.num_judged = 0  # drafts
        self.num_begun = 0  # drafts whose first token was accepted
        self.records: dict[int, SourceRecord] = {}
        """Records by sequence."""

    @property
    def is_misread(self) -> bool:
        """Whether almost none of the first `NUM_JUDGED` drafts was right; False before and after the last of them."""
        return self.num_judged == NUM_JUDGED and self.num_begun < MIN_BEGUN * NUM_JUDGED

    def earn(self, seconds: float, *, max_credit: float) -> None:
        """Adds time for trials. At most `max_credit` is saved up; then the debt that a trial may leave grows."""
        self._credit += seconds
        if self._credit >= max_credit:
            self._credit = max_credit
            self._max_debt += DEBT_FACTOR * seconds + DEBT_GROWTH * self._max_debt

    def observe_tree_bonus(self, *, expected: float, found: float) -> None:
        """Learns, in tokens, the gain that was expected of a draft's chain, and that of the whole draft."""
        self._num_found += 1
        self.tree_bonus += max(TREE_BONUS_RATE, 1 / self._num_found) * (found - expected - self.tree_bonus)

    def add_trial(self, asked: dict[int, int], num_missed: Mapping[int, int], *, before: int) -> None:
        """Adds one token of one sequence that was not asked for since step `before` to `asked`, as credit allows.

        Of the sequences that the credit pays for, the one that was asked for longest ago is tried. If it pays for none,
        the cheapest is tried once it may leave such a debt: so a trial comes in the end, however much must be read, and
        the next one when the debt is paid off. A trial that has begun goes on until its text is read.

        `num_missed`: unread tokens of each sequence that may be tried.
        """
        if self._trial not in num_missed or self._trial in asked:
            self._trial = self._next_trial(asked, num_missed, before=before)
        if self._trial is not None:
            asked[self._trial] = 1

    def observe_trial(self, asked: Mapping[int, int], *, num_read: int) -> None:
        """Pays for the trial that was added, if there was one, at the price that is known now.

        `asked`: the sequences whose text is read; `num_read`: tokens that were read for all of them.
        """
        if self._trial is None:
            return
        self._credit -= self.cost.seconds(1 if asked.keys() <= {self._trial} else 0, 1, num_read)
        if self._trial in asked:
            self._trial = None

    def _next_trial(self, asked: Mapping[int, int], num_missed: Mapping[int, int], *, before: int) -> int | None:
        records = self.records
        seconds = {
            key: self.cost.seconds(0 if asked else 1, 1, num_missed[key])
            for key in num_missed.keys() - asked.keys()
            if records[key].last_asked <= before
        }
        paid = [key for key, each in seconds.items() if each <= self._credit]
        if paid:
            return min(paid, key=lambda key: (records[key].last_asked, key))
        cheapest = min(seconds, key=lambda key: (seconds[key], key), default=None)
        if cheapest is None or seconds[cheapest] > self._credit + self._max_debt:
            return None
        self._max_debt = 0.0
        return cheapest


class SourceRecord:
    """What one sequence accepts of a source, by grade. Not thread-safe."""

    __slots__ = ("_begun", "_by_grade", "_num_positions", "_source", "last_asked", "marginal_gain", "overall")

    def __init__(self, source: DraftSource, num_positions: int, *, step: int) -> None:
        """`step`: the one that counts as the last in which a draft was verified or asked for."""
        self._source = source
        self._num_positions = num_positions
        self._begun = step
        self._by_grade: dict[int, AcceptanceRecord] = {}
        self.overall = AcceptanceRecord(source.overall, num_positions, step=step)
        """The record of drafts of all grades: before a draft is made, its grade is not known."""
        self.last_asked = step
        self.marginal_gain = FIRST_MARGINAL_GAIN
        """The mean number of tokens that its drafts were expected to gain beyond the best draft of others."""

    def of(self, grade: int) -> AcceptanceRecord:
        """Returns the record of drafts of that grade."""
        record = self._by_grade.get(grade)
        if record is None:
            record = AcceptanceRecord(self._source.acceptance[grade], self._num_positions, step=self._begun)
            self._by_grade[grade] = record
        return record

    def observe(self, draft: DraftTree, accepted: Sequence[int], *, step: int, anew_after: int) -> None:
        """Learns which tokens of a draft were accepted: their indices, from the root on.

        `anew_after`: steps without a verdict after which an accepted draft shows that the text has changed.
        """
        self._source.num_judged += 1
        self._source.num_begun += bool(accepted)
        for record in (self.of(draft.grade), self.overall):
            if accepted and step - record.last_step >= anew_after:
                record.begin_anew()
            record.last_step = step
            if draft.parents:
                record.observe_tree(draft, accepted)
            else:
                record.observe_chain(len(draft.token_ids), len(accepted))

    def observe_marginal_gain(self, tokens: float) -> None:
        """Learns the marginal gain in a step in which the source was asked: 0 if it had nothing better than others."""
        self.marginal_gain += MARGINAL_GAIN_RATE * (tokens - self.marginal_gain)

    @property
    def adds_nothing(self) -> bool:
        """Whether its drafts hardly gain what its messages cost."""
        return self.marginal_gain < MIN_MARGINAL_GAIN

    def best(self) -> AcceptanceRecord:
        """Returns the record of the grade whose drafts are accepted most."""
        grades = self._source.acceptance
        if len(grades) < 2:
            return self.of(next(iter(grades), 0))
        return max(map(self.of, grades), key=lambda record: record.chain[0])

    @property
    def last_step(self) -> int:
        """The last step in which a draft of any grade was judged."""
        return max((record.last_step for record in self._by_grade.values()), default=self._begun)
