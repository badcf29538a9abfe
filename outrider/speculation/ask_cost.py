"""Learns during serving what a call to a proposer costs, and decides for which sequences a call pays off."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

FIRST_CALLS = 5
"""Number of first calls in a process. Only the fastest of them counts, as some take far longer than any later call."""

CHEAP_SHARE = 0.01
"""A call that takes at most this fraction of a step's duration is cheap: a decision about the call would take as long
as the call itself.
"""

LEARNING_RATE = 0.2

OUTLIER_FACTOR = 2.0
"""A call counts as at most this many times its expected duration. A call that takes less than 1 / `OUTLIER_FACTOR` of
its expected duration shows that the expectation was wrong, and counts in full."""

TOKEN_SHARE = 0.1
MISSED_SHARE = 0.03
"""Assumed costs of a draft token for one more sequence, and of reading one missed token (a committed token that the
proposer has not read yet), as fractions of a forward's cost."""

CATCH_UP_STEPS = 32
"""Number of steps over which the cost of reading missed tokens is spread, because they are read only once."""


class CallCost:
    """Predicts a call's duration from four prices: one per call, one per forward (as many as the longest draft is
    deep), one per draft token, and one per missed token. Tokens of all sequences count.

    A head drafts one token of every sequence in a forward. A parallel head drafts all tokens in one forward, so the
    price per forward is learnt as zero. Each call corrects the four prices by its error (normalised least mean squares,
    Widrow and Hoff 1960). No price falls below 0. Not thread-safe.
    """

    __slots__ = ("_num_calls", "_scaled", "call_seconds")

    def __init__(self) -> None:
        self._num_calls = 0
        self._scaled = [0.0, 0.0, 0.0, 0.0]  # the four prices, each divided by its assumed fraction of a forward
        self.call_seconds = 0.0
        """The mean duration of a call, in seconds, by which sources are ordered; 0: unknown."""

    def is_cheap(self, step_seconds: float) -> bool:
        """Returns whether a call is cheaper than the decision about it. A proposer without calls counts as cheap.

        `step_seconds`: the duration of a step without drafts.
        """
        return not self._num_calls or self.call_seconds <= CHEAP_SHARE * step_seconds

    def observe(self, seconds: float, *, depth: int, num_tokens: int, num_unread: int) -> None:
        """Learns from the total duration of all calls that made a step's drafts.

        `depth`: length of the longest draft; `num_tokens`: draft tokens of all sequences; `num_unread`: committed
        tokens that the proposer read.
        """
        if seconds <= 0.0:  # the clock did not advance
            return
        self._num_calls += 1
        asked = (1.0, depth, TOKEN_SHARE * num_tokens, MISSED_SHARE * num_unread)
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

    def seconds(self, depth: int, num_tokens: int, num_unread: float) -> float:
        """Returns the expected seconds to read `num_unread` tokens and draft `num_tokens`, at most `depth` deep."""
        call, forward, token, missed = self._scaled
        return call + depth * forward + TOKEN_SHARE * num_tokens * token + MISSED_SHARE * num_unread * missed


class Candidate(NamedTuple):
    """A sequence for which a proposer may be asked."""

    sequence_id: int
    chain: Sequence[float]  # for each position, the probability that the draft is accepted up to it
    current_gain: float  # expected gain of the best draft found so far
    num_unread: int  # tokens that the proposer has not read
    tree_bonus: float = 0.0  # expected gain of the proposer's draft in addition to that of `chain`


def expected_gain(probabilities: Sequence[float], row_price: float) -> float:
    """Returns how many tokens a draft is expected to gain, minus the price of their rows.

    Tokens that cost more than they gain are left out.
    """
    return sum([each - row_price for each in probabilities if each > row_price])


def choose_calls(
    candidates: Sequence[Candidate], cost: CallCost, *, token_rate: float, row_price: float, min_gain: float = 0.0
) -> dict[int, int]:
    """Returns how many tokens to ask for, by sequence id; other sequences are absent.

    A sequence is included if its new draft is expected to gain more over the draft at hand than it adds to the call's
    cost. The call is made if the total gain exceeds the call's cost. To find the best length of the longest draft, all
    possible lengths are compared.

    Args:
        candidates: the sequences of the batch.
        cost: the proposer's cost model.
        token_rate: tokens per second that the batch would generate, i.e. the value of time.
        row_price: lowest probability at which a draft token pays for its row.
        min_gain: tokens that the call must gain beyond its cost.
    """
    longest = max([len(candidate.chain) for candidate in candidates], default=0)
    gains = [-token_rate * cost.seconds(depth, 0, 0) for depth in range(1, longest + 1)]
    token_price = token_rate * cost.seconds(0, 1, 0) - token_rate * cost.seconds(0, 0, 0)
    missed_price = (token_rate * cost.seconds(0, 0, 1) - token_rate * cost.seconds(0, 0, 0)) / CATCH_UP_STEPS
    numbers: dict[int, list[int]] = {}  # tokens to ask for, by sequence id, for each length of the longest draft
    for sequence_id, chain, current_gain, num_unread, tree_bonus in candidates:
        gain = tree_bonus - current_gain - missed_price * num_unread
        if gain + expected_gain(chain, row_price) <= 0.0:
            continue
        best_gain, best_number = 0.0, 0
        found: list[int] = []
        for place in range(longest):
            min_probability = row_price if place else row_price - tree_bonus
            if place < len(chain) and chain[place] > min_probability:
                gain += max(chain[place] - row_price, 0.0) - token_price
                if gain > best_gain:
                    best_gain, best_number = gain, place + 1
            gains[place] += best_gain
            found.append(best_number)
        numbers[sequence_id] = found
    best = max(range(longest), key=gains.__getitem__, default=0)
    if not numbers or gains[best] <= min_gain:
        return {}
    return {sequence_id: found[best] for sequence_id, found in numbers.items() if found[best]}
