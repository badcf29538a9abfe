"""What it takes to ask a proposer, learnt while serving, and which sequences of a batch it is worth asking for."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

FIRST_CALLS = 5
"""Of a process. Some of them take far longer than any later one: until there were so many, the quickest counts."""

CHEAP_SHARE = 0.01
"""Of a step: to decide about a call that takes no more would take as long as the call."""

LEARNING_RATE = 0.2

OUTLIER_FACTOR = 2.0
"""A call that takes longer than this many times the expected counts as this many times. One that takes less than the
inverse shows that the expectation was wrong, and counts in full."""

TOKEN_SHARE = 0.1
MISSED_SHARE = 0.03
"""Until calls say otherwise: what a further sequence's draft token, and a token to be read, take beside a forward."""

CATCH_UP_STEPS = 32
"""A proposer that has missed tokens reads them once: the time counts as that of so many steps."""


class AskCost:
    """T(depth, tokens, missed) = a call + depth forwards + draft tokens of all sequences + tokens that were missed.

    A head drafts one token of every sequence in a forward; a parallel one drafts all in one, so that its depth comes to
    cost nothing. Each call corrects the four prices by its error (normalised least mean squares, Widrow and Hoff 1960),
    none below 0. Not thread-safe.
    """

    __slots__ = ("_num_calls", "_scaled", "call_seconds")

    def __init__(self) -> None:
        self._num_calls = 0
        self._scaled = [0.0, 0.0, 0.0, 0.0]  # the prices, each over its share of a forward
        self.call_seconds = 0.0
        """Of a call, on average: the order in which sources are asked. 0: unknown."""

    def is_cheap(self, step_seconds: float) -> bool:
        """Whether to ask is cheaper than to think about it. So is what was hardly asked yet.

        `step_seconds`: of a plain step.
        """
        return self._num_calls < FIRST_CALLS or self.call_seconds <= CHEAP_SHARE * step_seconds

    def observe(self, seconds: float, *, depth: int, num_tokens: int, num_missed: int) -> None:
        """Learns from one draft of at least one sequence, in as many calls as it took."""
        if seconds <= 0.0:  # a clock that stood still
            return
        self._num_calls += 1
        asked = (1.0, depth, TOKEN_SHARE * num_tokens, MISSED_SHARE * num_missed)
        if self._num_calls <= FIRST_CALLS:
            forward_seconds = seconds / sum(asked[1:])
            if self._num_calls == 1 or forward_seconds < self._scaled[1]:
                self._scaled = [0.0, forward_seconds, forward_seconds, forward_seconds]
                self.call_seconds = seconds
            return
        self.call_seconds += LEARNING_RATE * (min(seconds, OUTLIER_FACTOR * self.call_seconds) - self.call_seconds)
        expected = sum(map(mul, self._scaled, asked))
        if OUTLIER_FACTOR * seconds < expected:
            self._scaled = [each * seconds / expected for each in self._scaled]
            return
        error = min(seconds, OUTLIER_FACTOR * expected) - expected
        step = LEARNING_RATE * error / sum(map(mul, asked, asked))
        self._scaled = [max(each + step * one, 0.0) for each, one in zip(self._scaled, asked, strict=True)]

    def seconds(self, depth: int, num_tokens: int, num_missed: float) -> float:
        """Of a draft at most `depth` tokens long, `num_tokens` over all sequences, which read so many tokens first."""
        call, forward, token, missed = self._scaled
        return call + depth * forward + TOKEN_SHARE * num_tokens * token + MISSED_SHARE * num_missed * missed


class Candidate(NamedTuple):
    """A sequence for which a proposer may be asked."""

    sequence_id: int
    chain: Sequence[float]  # by position the probability that its draft is accepted to there
    at_hand: float  # worth of the draft that is here already
    num_missed: int  # tokens that the proposer has not read
    tree_bonus: float = 0.0  # what the proposer's drafts are worth beyond such a chain


def expected_gain(probabilities: Sequence[float], row_price: float) -> float:
    """The tokens that a draft is expected to win, less those that its rows cost."""
    return sum([each - row_price for each in probabilities if each > row_price])


def choose_asked(
    candidates: Sequence[Candidate], cost: AskCost, *, token_rate: float, row_price: float
) -> dict[int, int]:
    """The number of tokens to ask for, by sequence id; absent ones are not asked for.

    A sequence is taken in if its draft is expected to better the one at hand by more than it adds to the call; the call
    is made if all of them together gain more than it takes. All lengths of the longest draft are compared.

    Args:
        candidates: the sequences of the batch.
        cost: of the proposer.
        token_rate: tokens that the batch would generate in a second: what time is worth.
        row_price: least probability of a draft token that pays for its row.
    """
    longest = max((len(candidate.chain) for candidate in candidates), default=0)
    gains = [-token_rate * cost.seconds(depth, 0, 0) for depth in range(1, longest + 1)]
    token_price = token_rate * cost.seconds(0, 1, 0) - token_rate * cost.seconds(0, 0, 0)
    missed_price = (token_rate * cost.seconds(0, 0, 1) - token_rate * cost.seconds(0, 0, 0)) / CATCH_UP_STEPS
    numbers: dict[int, list[int]] = {}  # by sequence, for each length of the longest draft
    for candidate in candidates:
        chain = candidate.chain
        gain = candidate.tree_bonus - candidate.at_hand - missed_price * candidate.num_missed
        best_gain, best_number = 0.0, 0
        found: list[int] = []
        for place in range(longest):
            least = row_price if place else row_price - candidate.tree_bonus
            if place < len(chain) and chain[place] > least:
                gain += max(chain[place] - row_price, 0.0) - token_price
                if gain > best_gain:
                    best_gain, best_number = gain, place + 1
            gains[place] += best_gain
            found.append(best_number)
        numbers[candidate.sequence_id] = found
    best = max(range(longest), key=gains.__getitem__, default=0)
    if not longest or gains[best] <= 0.0:
        return {}
    return {sequence_id: found[best] for sequence_id, found in numbers.items() if found[best]}
