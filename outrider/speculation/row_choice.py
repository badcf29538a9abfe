"""Chooses which draft tokens of a whole batch are worth a row of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv
from typing import NamedTuple

from outrider.speculation.trial_budget import TrialBudget


class RowChoice(NamedTuple):
    """The numbers of draft tokens that one step verifies, and the expected result."""

    num_rows: Sequence[int]  # for each draft, the number of its first tokens that the step verifies
    expected_tokens: float  # tokens that the step commits, over all sequences
    expected_seconds: float  # the step's duration
    token_seconds: float  # seconds per committed token with the number of rows that has the highest rate
    row_price: float  # lowest probability at which a draft token would have been worth a row


@dataclass(slots=True, kw_only=True)
class StepOffer:
    """The drafts that one step may verify, and the durations of the possible steps."""

    drafts: Sequence[Sequence[float]]
    """For each token of each draft, the probability that the text follows the draft up to and including the token. This
    is the product of the acceptances on the token's path and, for a token with earlier siblings, of (1 - acceptance)
    of each of them. Tokens come in order of falling probability, with parents before children, so the n most probable
    tokens of a draft are its first n.
    """
    step_seconds: Sequence[float]
    """Durations of a step with 0, 1, ... draft rows, each positive. There are at least
    min(max_rows, number of all draft tokens) + 1 entries. Further entries determine `row_price` if all draft tokens are
    verified.
    """
    max_rows: int  # maximum number of draft rows
    num_sequences: int  # at least 1; even without drafts, the step commits one token of each sequence
    num_waiting: int = 0  # number of prompts whose computation waits for the end of the step
    min_gain: float = 0.0  # tokens that drafts must gain in all, unless the number of rows is given

    def priced(self, seconds: float) -> float:
        """Returns what `seconds` cost, in seconds of the batch. A waiting prompt loses as much as a sequence."""
        return seconds * (1.0 + self.num_waiting / self.num_sequences)

    def choose(self, *, num_rows: int | None = None) -> RowChoice:
        """Gives rows to the likeliest draft tokens, as long as they gain more than their time costs.

        The step commits `num_sequences` tokens without drafts, and one more for each accepted draft token. With r
        rows for drafts its expected rate is (num_sequences + the r largest probabilities) / step_seconds[r]; the best
        r maximises this rate. The curve `step_seconds` may have any shape. While prompts wait for the end of the step,
        a second costs the tokens that the batch would generate in it, plus those that the waiting prompts would
        generate, each at the rate of one sequence of the batch.

        `num_rows`: the number of rows to use instead of the best one, so that its duration is learned.

        Cost: one sort of all tokens. Source: the objective, goodput, is that of SmartSpec (Liu et al. 2024, arXiv
        2406.14066). Because probabilities never rise along a path, the greedy choice is the best tree (Sequoia, Chen
        et al. 2024).
        """
        step_seconds = self.step_seconds
        flat: list[float] = []
        owners: list[int] = []
        for owner, draft in enumerate(self.drafts):
            flat += draft
            owners += [owner] * len(draft)
        # The sort is stable, so a parent comes before an equally likely child.
        order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)[: self.max_rows]
        # The expected number of committed tokens, by number of draft rows.
        gained = list(accumulate(map(flat.__getitem__, order), initial=float(self.num_sequences)))
        rates = list(map(truediv, gained, step_seconds))
        best_rate = max(rates)
        best = rates.index(best_rate)
        time_price = self.priced(best_rate)
        if num_rows is not None:
            best = min(num_rows, len(order))
        elif self.num_waiting:
            best = max(range(len(gained)), key=lambda row: gained[row] - time_price * step_seconds[row])
        gain = gained[best] - gained[0] - time_price * (step_seconds[best] - step_seconds[0])
        if num_rows is None and gain < self.min_gain:
            best = 0
        counts = [0] * len(self.drafts)
        for index in order[:best]:
            counts[owners[index]] += 1
        # The price of replacing the least likely verified token, then the mean prices of adding 1, 2, 4, … tokens.
        prices = [flat[order[best - 1]]] if best else []
        ahead = 1
        while best + ahead < len(step_seconds):
            prices.append(time_price * (step_seconds[best + ahead] - step_seconds[best]) / ahead)
            ahead *= 2
        return RowChoice(counts, gained[best], step_seconds[best], 1.0 / best_rate, min(prices, default=1.0))

    def with_trials(self, choice: RowChoice, due: Sequence[int], budget: TrialBudget) -> Sequence[int]:
        """Adds one token to drafts without rows, as a trial, as far as the budget allows.

        `due`: places of the drafts that may be tried, the first ones first.
        """
        num_rows = list(choice.num_rows)
        total = sum(num_rows)
        for place in due:
            if num_rows[place] or not self.drafts[place]:
                continue
            if total == self.max_rows:
                break
            price = self.priced(self.step_seconds[total + 1] - self.step_seconds[total])
            if price > budget.credit and not budget.allows_debt(price):
                break
            budget.credit -= price
            num_rows[place] = 1
            total += 1
        return num_rows
