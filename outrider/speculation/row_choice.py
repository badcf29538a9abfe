"""Which draft tokens of a whole batch are worth a row of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

MARGIN_ROWS = 4
"""The price of a row is the mean over so many after those chosen."""


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What one step verifies, and what is expected of it."""

    num_rows: Sequence[int]  # of each draft, how many of its tokens: the first ones
    expected_tokens: float  # that the step commits, over all sequences
    expected_seconds: float  # that it takes
    row_price: float  # least probability of a further token that would have paid


def choose_rows(
    drafts: Sequence[Sequence[float]],
    step_seconds: npt.NDArray[np.float64],
    *,
    max_rows: int,
    num_tokens: int,
    num_waiting: int = 0,
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
        step_seconds: [at least min(max_rows, tokens of all drafts) + 1] seconds of a step with 0, 1, ... rows for
            drafts; positive. Further entries let `row_price` look ahead.
        max_rows: for drafts, at most.
        num_tokens: at least 1.
        num_waiting: prompts that are computed when the step has ended.

    Cost: one sort of all tokens. Source: goodput as the objective is SmartSpec's (Liu et al. 2024, arXiv 2406.14066);
    as probabilities never rise along a path, the greedy choice is the best tree (Sequoia, Chen et al. 2024).
    """
    sizes = [len(draft) for draft in drafts]
    probabilities = np.fromiter(chain.from_iterable(drafts), dtype=np.float64, count=sum(sizes))
    order = np.argsort(-probabilities, kind="stable")[:max_rows]  # of equals the first: parents before children
    gained = np.empty(len(order) + 1)
    gained[0] = num_tokens
    np.cumsum(probabilities[order], out=gained[1:])
    gained[1:] += num_tokens
    seconds = step_seconds[: len(gained)]
    rates = gained / seconds
    best = int(rates.argmax())
    time_price = float(rates[best]) * (1.0 + num_waiting / num_tokens)
    if num_waiting:
        best = int((gained - time_price * seconds).argmax())
    last = min(best + MARGIN_ROWS, len(step_seconds) - 1)
    row_price = time_price * float(step_seconds[last] - step_seconds[best]) / (last - best) if last > best else 0.0
    return RowChoice(
        _count_by_draft(sizes, order[:best]), float(gained[best]), float(seconds[best]), max(row_price, 0.0)
    )


def _count_by_draft(sizes: Sequence[int], chosen: npt.NDArray[np.int64]) -> list[int]:
    """How many of the chosen tokens, numbered over all drafts, each draft has."""
    if len(chosen) == sum(sizes):
        return list(sizes)
    owners = np.repeat(np.arange(len(sizes)), sizes)[chosen]
    counts: list[int] = np.bincount(owners, minlength=len(sizes)).tolist()
    return counts
