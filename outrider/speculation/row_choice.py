"""Which draft tokens of a whole batch are worth a row of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv

from outrider.engine.scheduler import StepRoom
from outrider.speculation.step_cost import StepCostModel


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What one step verifies, and what is expected of it."""

    num_rows: Sequence[int]  # of each draft, how many of its tokens: the first ones
    expected_tokens: float  # that the step commits, over all sequences
    expected_seconds: float  # that it takes
    token_seconds: float  # that a token takes at the best rate: what one more is worth
    row_price: float  # probability from which another token might have paid


def choose_rows(
    drafts: Sequence[Sequence[float]],
    step_seconds: Sequence[float],
    *,
    max_rows: int,
    num_tokens: int,
    num_waiting: int = 0,
    num_rows: int | None = None,
) -> RowChoice:
    """Gives rows to the draft tokens that gain most, as long as they gain more than the time they take.

    The step commits `num_tokens` tokens without drafts, and one more for each draft token that is accepted. With r
    rows for drafts its expected rate is (num_tokens + the r largest probabilities) / step_seconds[r]; the best r makes
    it largest. Any shape of step_seconds will do. While prompts wait for the end of the step, a second costs what the
    batch would generate in it, and what they would, each at the rate of one sequence of the batch.

    Args:
        drafts: of each draft and token the probability that the text goes through it: its parents' acceptance times
            its own. A draft lists parents before children and never rises, so the best n of it are its first n.
            For a chain these are prefix products of acceptance; a sibling has (1 - acceptance of those before it)
            times its own.
        step_seconds: of a step with 0, 1, ... rows for drafts, at least min(max_rows, tokens of all drafts) + 1 of
            them; positive. Further entries say what `row_price` is where all is verified.
        max_rows: for drafts, at most.
        num_tokens: at least 1.
        num_waiting: prompts that are computed when the step has ended.
        num_rows: not the best number of rows but this one, so that its time is learnt.

    Cost: one sort of all tokens. Source: goodput as the objective is SmartSpec's (Liu et al. 2024, arXiv 2406.14066);
    as probabilities never rise along a path, the greedy choice is the best tree (Sequoia, Chen et al. 2024).
    """
    flat: list[float] = []
    owners: list[int] = []
    for owner, draft in enumerate(drafts):
        flat += draft
        owners += [owner] * len(draft)
    # Of equals the first: parents before children.
    order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)[:max_rows]
    gained = list(accumulate(map(flat.__getitem__, order), initial=float(num_tokens)))  # by number of rows
    rates = list(map(truediv, gained, step_seconds))
    best_rate = max(rates)
    best = rates.index(best_rate)
    time_price = best_rate * (1.0 + num_waiting / num_tokens)
    if num_rows is not None:
        best = min(num_rows, len(order))
    elif num_waiting:
        best = max(range(len(gained)), key=lambda row: gained[row] - time_price * step_seconds[row])
    counts = [0] * len(drafts)
    for index in order[:best]:
        counts[owners[index]] += 1
    prices = [flat[order[best - 1]]] if best else []  # what it takes to replace a token, or to add one
    ahead = 1
    while best + ahead < len(step_seconds):
        prices.append(time_price * (step_seconds[best + ahead] - step_seconds[best]) / ahead)
        ahead *= 2
    return RowChoice(counts, gained[best], step_seconds[best], 1.0 / best_rate, min(prices, default=1.0))


class StepOffer:
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
        asked_seconds: float,
    ) -> None:
        """`asked_seconds`: that the drafts took. They belong to the step, whatever is verified of them."""
        self.probabilities = probabilities
        self.num_rows = room.num_rows
        self.num_sequences = len(room.sequences)
        self.num_waiting = num_waiting
        num_possible = min(room.max_draft_rows, self.num_sequences * num_speculative_tokens)
        self.max_rows = min(sum(map(len, probabilities)), num_possible)
        reach = None if room.prompts or verifies_all else cost.reach()
        if reach is not None:
            self.max_rows = max(0, min(self.max_rows, reach - room.num_rows))
        step_seconds = cost.seconds(self.num_sequences, room.num_rows, num_more=num_possible)
        self.plain_seconds = step_seconds[0]
        self.step_seconds = [each + asked_seconds for each in step_seconds]

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
