"""Which draft tokens of a whole batch are worth a row of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What one step verifies, and what is expected of it."""

    num_rows: Sequence[int]  # of each draft, how many of its tokens: the first ones
    expected_tokens: float  # that the step commits, over all sequences
    expected_seconds: float  # that it takes
    token_seconds: float  # that a token takes at the best rate: what one more is worth
    row_price: float  # probability from which another token might have paid


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOffer:
    """What one step may verify, and at which price."""

    drafts: Sequence[Sequence[float]]
    """Of each draft and token the probability that the text goes through it: its parents' acceptance times its own. A
    draft lists parents before children and never rises, so the best n of it are its first n. For a chain these are
    prefix products of acceptance; a sibling has (1 - acceptance of those before it) times its own."""
    step_seconds: Sequence[float]
    """Of a step with 0, 1, ... rows for drafts, at least min(max_rows, tokens of all drafts) + 1 of them; positive.
    Further entries say what `row_price` is where all is verified."""
    max_rows: int  # for drafts
    num_sequences: int  # at least 1: the step commits one token of each without drafts
    num_waiting: int = 0  # prompts that are computed when the step has ended

    def priced(self, seconds: float) -> float:
        """Returns these, and those of the prompts that wait for them."""
        return seconds * (1.0 + self.num_waiting / self.num_sequences)

    def choose(self, *, num_rows: int | None = None) -> RowChoice:
        """Gives rows to the draft tokens that gain most, as long as they gain more than the time they take.

        The step commits `num_sequences` tokens without drafts, and one more for each draft token that is accepted. With
        r rows for drafts its expected rate is (num_sequences + the r largest probabilities) / step_seconds[r]; the best
        r makes it largest. Any shape of step_seconds will do. While prompts wait for the end of the step, a second
        costs what the batch would generate in it, and what they would, each at the rate of one sequence of the batch.

        `num_rows`: not the best number of rows but this one, so that its time is learnt.

        Cost: one sort of all tokens. Source: goodput as the objective is SmartSpec's (Liu et al. 2024, arXiv
        2406.14066); as probabilities never rise along a path, the greedy choice is the best tree (Sequoia, Chen et al.
        2024).
        """
        step_seconds = self.step_seconds
        flat: list[float] = []
        owners: list[int] = []
        for owner, draft in enumerate(self.drafts):
            flat += draft
            owners += [owner] * len(draft)
        # Of equals the first: parents before children.
        order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)[: self.max_rows]
        gained = list(accumulate(map(flat.__getitem__, order), initial=float(self.num_sequences)))  # by number of rows
        rates = list(map(truediv, gained, step_seconds))
        best_rate = max(rates)
        best = rates.index(best_rate)
        time_price = self.priced(best_rate)
        if num_rows is not None:
            best = min(num_rows, len(order))
        elif self.num_waiting:
            best = max(range(len(gained)), key=lambda row: gained[row] - time_price * step_seconds[row])
        counts = [0] * len(self.drafts)
        for index in order[:best]:
            counts[owners[index]] += 1
        prices = [flat[order[best - 1]]] if best else []  # what it takes to replace a token, or to add one
        ahead = 1
        while best + ahead < len(step_seconds):
            prices.append(time_price * (step_seconds[best + ahead] - step_seconds[best]) / ahead)
            ahead *= 2
        return RowChoice(counts, gained[best], step_seconds[best], 1.0 / best_rate, min(prices, default=1.0))
