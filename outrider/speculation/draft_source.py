"""One proposer, or the draft nodes: what its drafts are worth, in general and for one sequence, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from outrider.speculation.acceptance_record import AcceptanceRecord, SourceAcceptance
from outrider.speculation.ask_cost import AskCost
from outrider.speculation.draft_tree import DraftTree

NOTHING = -1
"""The grade of an answer without a draft."""

ANSWER_FORGETTING = 0.95
SOURCE_ANSWER_FORGETTING = 0.998
ANSWER_WEIGHT = 4.0
"""How many answers weigh as much as what the proposer answers to others."""


class _Answers:
    """How often an answer had each grade. Not thread-safe."""

    __slots__ = ("_forgetting", "_num", "_total")

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._num: dict[int, float] = {}
        self._total = 0.0

    def observe(self, grade: int) -> None:
        for each in self._num:
            self._num[each] *= self._forgetting
        self._num[grade] = self._num.get(grade, 0.0) + 1.0
        self._total = self._forgetting * self._total + 1.0

    def shares(self, others: dict[int, float] | None = None) -> dict[int, float]:
        """By grade; where `others` are given, these count as `ANSWER_WEIGHT` answers."""
        if others is None:
            return {grade: num / self._total for grade, num in self._num.items()} or {0: 1.0}
        total = self._total + ANSWER_WEIGHT
        return {
            grade: (self._num.get(grade, 0.0) + ANSWER_WEIGHT * share) / total
            for grade, share in (dict.fromkeys(self._num, 0.0) | others).items()
        }


class DraftSource:
    """Over all sequences. Not thread-safe."""

    __slots__ = ("_credit", "_trial_seconds", "acceptance", "answers", "cost", "records")

    def __init__(self) -> None:
        self.acceptance: dict[int, SourceAcceptance] = {}
        """By grade."""
        self.answers = _Answers(SOURCE_ANSWER_FORGETTING)
        self.cost = AskCost()
        self._credit = 0.0  # seconds, for trials
        self._trial_seconds = 0.0  # that the next one takes
        self.records: dict[int, SourceRecord] = {}
        """By sequence."""

    def earn(self, seconds: float, *, most: float) -> None:
        """So much for trials; at most `most` is saved up, or what the next one takes."""
        self._credit = min(self._credit + seconds, max(most, self._trial_seconds))

    def add_trials(self, asked: dict[int, int], num_missed: Mapping[int, int], *, before: int) -> None:
        """Asks for a token of sequences that were not asked for since that step, the longest first, as credit allows.

        `num_missed`: by sequence that may be tried, tokens that are not read yet.
        """
        records = self.records
        due = sorted((records[key].last_asked, key) for key in num_missed.keys() - asked.keys())
        depth = max(asked.values(), default=0)
        spent = self.cost.seconds(depth, 0, 0) if asked else 0.0
        refused: list[float] = []
        for _, sequence_id in takewhile(lambda each: each[0] <= before, due):
            with_it = self.cost.seconds(max(depth, 1), 1, num_missed[sequence_id])
            if with_it - spent > self._credit:
                refused.append(with_it - spent)
                continue
            self._credit -= with_it - spent
            asked[sequence_id] = 1
            depth, spent = max(depth, 1), self.cost.seconds(max(depth, 1), 0, 0)
        self._trial_seconds = min(refused, default=0.0)


class SourceRecord:
    """Of one sequence: what it accepts by grade, and which grades it is offered. Not thread-safe."""

    __slots__ = ("_answers", "_begun", "_by_grade", "_num_positions", "_source", "last_asked")

    def __init__(self, source: DraftSource, num_positions: int, *, step: int) -> None:
        """`step`: in which something was verified last, as far as that matters."""
        self._source = source
        self._num_positions = num_positions
        self._begun = step
        self._by_grade: dict[int, AcceptanceRecord] = {}
        self._answers = _Answers(ANSWER_FORGETTING)
        self.last_asked = step

    def of(self, draft: DraftTree) -> AcceptanceRecord:
        return self._of(draft.grade)

    def observe_answer(self, grade: int) -> None:
        """`NOTHING`: it had no draft."""
        self._answers.observe(grade)
        self._source.answers.observe(grade)

    def best(self) -> AcceptanceRecord:
        """Of the grade whose drafts are accepted most."""
        grades = self._source.acceptance or (0,)
        return max((self._of(grade) for grade in grades), key=lambda record: record.chain[0])

    def reaches(self, probability: float) -> bool:
        """Whether the first token of a draft of some grade is as likely."""
        return any(self._of(grade).chain[0] >= probability for grade in self._source.acceptance or (0,))

    @property
    def last_step(self) -> int:
        """In which a draft of any grade was judged."""
        return max((record.last_step for record in self._by_grade.values()), default=self._begun)

    def expected(self) -> Iterator[tuple[float, Sequence[float]]]:
        """What an answer may be: its probability, and the probabilities of its tokens."""
        others = self._source.answers.shares()
        for grade, share in (self._answers.shares(others) if len(others) > 1 else others).items():
            if grade != NOTHING:
                yield share, self._of(grade).chain

    def _of(self, grade: int) -> AcceptanceRecord:
        record = self._by_grade.get(grade)
        if record is None:
            acceptance = self._source.acceptance
            if grade not in acceptance:
                acceptance[grade] = SourceAcceptance()
            record = self._by_grade[grade] = AcceptanceRecord(
                acceptance[grade], self._num_positions, step=self._begun, beside=self._by_grade
            )
        return record
