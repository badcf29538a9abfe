"""Which sequences of a batch a proposer is asked for, and for how many tokens: where that gains more than it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.speculation.ask_cost import AskCost
from outrider.speculation.row_choice import choose_rows

CATCH_UP_STEPS = 32
"""A proposer that has missed tokens reads them once: the time counts as that of so many steps."""


class Candidate(NamedTuple):
    """A sequence for which a proposer may be asked."""

    sequence_id: int
    at_hand: Sequence[float]  # probabilities of the tokens of the draft that is here already
    answers: Sequence[tuple[float, Sequence[float]]]  # probability of an answer, and of its tokens
    num_missed: int  # tokens that the proposer has not read


@dataclass(frozen=True, slots=True)
class Prices:
    """What the time of a step is worth."""

    step_seconds: Sequence[float]  # of a step with 0, 1, … rows for drafts
    max_rows: int
    num_sequences: int
    num_waiting: int
    token_rate: float  # tokens that are lost in a second, by all who wait for it
    row_price: float  # least probability of a draft token that pays


def worth(probabilities: Sequence[float], row_price: float) -> float:
    """The tokens that a draft is expected to win, less those that its rows cost."""
    return sum([each - row_price for each in probabilities if each > row_price])


def choose_asked(candidates: Sequence[Candidate], cost: AskCost, prices: Prices) -> dict[int, int]:
    """The number of tokens to ask for, by sequence id; absent ones are not asked for.

    A sequence is taken in if its gain exceeds what it adds to the call; the call is made if the batch, with the rows
    that are best then, gains more than the call and those rows take. All numbers of tokens are compared.
    """
    gains = [list(_gains(candidate, cost, prices)) for candidate in candidates]
    longest = max(map(len, gains), default=0)
    if not any(_best_number(each) for each in gains):
        return {}
    best_worth = _worth_of([candidate.at_hand for candidate in candidates], 0.0, prices)
    best: dict[int, int] = {}
    for most in range(1, longest + 1):
        asked: dict[int, int] = {}
        probabilities: list[Sequence[float]] = []
        num_missed = 0
        for candidate, gained in zip(candidates, gains, strict=True):
            num_tokens = _best_number(gained[:most])
            if num_tokens:
                asked[candidate.sequence_id] = num_tokens
                num_missed += candidate.num_missed
                probabilities.append(_answered(candidate, num_tokens, prices.row_price))
            else:
                probabilities.append(candidate.at_hand)
        if not asked:
            continue
        depth = max(asked.values())
        if depth < most:
            break
        seconds = cost.seconds(depth, sum(asked.values()), num_missed / CATCH_UP_STEPS)
        found = _worth_of(probabilities, seconds, prices)
        if found > best_worth:
            best_worth, best = found, asked
    return best


def _gains(candidate: Candidate, cost: AskCost, prices: Prices) -> Iterator[float]:
    """Of 1, 2, … tokens: what they add to the draft at hand, less what they add to a call that is made anyway."""
    price = prices.row_price
    at_hand = worth(candidate.at_hand, price)
    token_price = prices.token_rate * cost.token_seconds()
    taken = prices.token_rate * cost.missed_seconds() * candidate.num_missed / CATCH_UP_STEPS
    answers = candidate.answers
    won = [0.0] * len(answers)
    for place in range(max((len(chain) for _, chain in answers), default=0)):
        taken += token_price
        gain, is_over = -taken, True
        for answer, (share, chain) in enumerate(answers):
            if place < len(chain) and chain[place] > price:
                won[answer] += chain[place] - price
                is_over = False
            if won[answer] > at_hand:
                gain += share * (won[answer] - at_hand)
        if is_over:  # probabilities never rise
            return
        yield gain


def _best_number(gained: Sequence[float]) -> int:
    """Of tokens, by their gains; 0: none gains anything."""
    most = max(gained, default=0.0)
    return gained.index(most) + 1 if most > 0.0 else 0


def _answered(candidate: Candidate, num_tokens: int, row_price: float) -> Sequence[float]:
    """The probabilities of the draft that there will be, on average over the answers."""
    at_hand = candidate.at_hand
    least = worth(at_hand, row_price)
    size = max(num_tokens, len(at_hand))
    mean = [0.0] * size
    left = 1.0
    for share, chain in candidate.answers:
        cut = chain[:num_tokens]
        left -= share
        for place, each in enumerate(cut if worth(cut, row_price) > least else at_hand):
            mean[place] += share * each
    for place, each in enumerate(at_hand):
        mean[place] += max(left, 0.0) * each
    return mean


def _worth_of(probabilities: Sequence[Sequence[float]], seconds: float, prices: Prices) -> float:
    """Expected tokens of the step, less those that its time and these seconds cost."""
    choice = choose_rows(
        probabilities,
        [each + seconds for each in prices.step_seconds],
        max_rows=prices.max_rows,
        num_tokens=prices.num_sequences,
        num_waiting=prices.num_waiting,
    )
    return choice.expected_tokens - prices.token_rate * choice.expected_seconds
