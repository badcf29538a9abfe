"""Estimates how often draft tokens of one proposer are accepted in one sequence, by position."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import ROOT, DraftTree

PRIOR_ACCEPTANCE = 0.65
"""Assumed acceptance of a new proposer's draft tokens."""

PRIOR_TOKENS = 8.0
"""Weight of the acceptance that is assumed for a new sequence or proposer, in draft tokens."""

POSITION_TOKENS = 8.0
"""Weight of a sequence's overall acceptance in the estimate for one position, in draft tokens."""

SIBLING_ACCEPTANCE = 0.3
SIBLING_TOKENS = 4.0
"""Assumed acceptance of a token whose earlier siblings were rejected, and the assumption's weight in draft tokens."""

PATH_ACCEPTANCE = 0.7
PATH_TOKENS = 4.0
PATH_FORGETTING = 0.97
"""Acceptance that a draft model assumes for its own tokens when it looks ahead, the weight of this assumption in draft
tokens, and the factor by which each new token reduces the weight of older ones."""

PRIOR_RUNNERS_UP = (0.5, 0.2, 0.1)
"""Assumed probability of each runner-up of a drafter's race to be the target's token, given that the winner was
rejected. In simulations of a coupled race (temperature 1, 32k ids) the target's token was the drafter's winner at 84 %
of all positions, among its first two at 95 % and among its first four at 99 %.
"""

NUM_RUNNERS_UP = len(PRIOR_RUNNERS_UP)

FORGETTING = 0.95
"""Factor by which each new draft of a sequence reduces the weight of the sequence's older drafts."""

SOURCE_FORGETTING = 0.995
"""The same factor for a proposer's drafts over all sequences."""


class Acceptance:
    """A running mean of the acceptance of draft tokens, in which recent tokens weigh most. Not thread-safe."""

    __slots__ = ("_forgetting", "_num_accepted", "_num_decided", "_prior", "_prior_tokens")

    def __init__(
        self,
        prior: float = PRIOR_ACCEPTANCE,
        *,
        prior_tokens: float = PRIOR_TOKENS,
        forgetting: float = SOURCE_FORGETTING,
    ) -> None:
        """`prior`: the assumed acceptance; `prior_tokens`: its weight in draft tokens.

        The defaults are for a proposer's drafts over all sequences. Their mean is the prior of each new sequence.
        """
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._forgetting = forgetting
        self._num_decided = 0.0
        self._num_accepted = 0.0

    @property
    def mean(self) -> float:
        return (self._num_accepted + self._prior_tokens * self._prior) / (self._num_decided + self._prior_tokens)

    def observe(self, num_decided: int, num_accepted: int) -> None:
        self._num_decided = self._forgetting * self._num_decided + num_decided
        self._num_accepted = self._forgetting * self._num_accepted + num_accepted


def path_acceptance(prior: float = PATH_ACCEPTANCE) -> Acceptance:
    """Returns a new running mean for a draft model's tokens, or its runners-up of one rank, in one sequence."""
    return Acceptance(prior, prior_tokens=PATH_TOKENS, forgetting=PATH_FORGETTING)


class AcceptanceRecord:
    """Acceptance by draft position, for one sequence and one proposer's drafts of one grade. Not thread-safe.

    A position counts as decided only if all tokens before it were accepted: a draft that was rejected earlier says
    nothing about the position (the product-limit estimate, Kaplan and Meier 1958, with exponential forgetting). The
    prior of a position is the sequence's overall acceptance, whose prior is the proposer's acceptance over all
    sequences. So a position that has not been reached for a long time is assumed to be like the others, and is tried
    again.
    """

    __slots__ = ("_accepted", "_chain", "_decided", "_num_positions", "_siblings", "_source", "last_step")

    def __init__(self, source: Acceptance, num_positions: int, *, step: int) -> None:
        self._source = source
        self._num_positions = num_positions
        self.last_step = step  # last step in which a draft was verified
        self.reset()

    def reset(self) -> None:
        """Forgets all observations, because the text may have changed in kind."""
        self._decided = [0.0] * self._num_positions
        self._accepted = [0.0] * self._num_positions
        # How often a sibling was accepted instead, over all rejected first children that had siblings.
        self._siblings = Acceptance(SIBLING_ACCEPTANCE, prior_tokens=SIBLING_TOKENS, forgetting=FORGETTING)
        self._chain: list[float] | None = None

    @property
    def chain(self) -> list[float]:
        """For each position, the probability that a chain is accepted up to it. It never rises along the chain."""
        if self._chain is None:
            prior = PRIOR_TOKENS * self._source.mean
            overall = (sum(self._accepted) + prior) / (sum(self._decided) + PRIOR_TOKENS)
            assumed, probability, self._chain = POSITION_TOKENS * overall, 1.0, []
            for accepted, decided in zip(self._accepted, self._decided, strict=True):
                probability *= (accepted + assumed) / (decided + POSITION_TOKENS)
                self._chain.append(probability)
        return self._chain

    def observe(self, num_decided: int, num_accepted: int, rescued: Sequence[bool] = ()) -> None:
        """Learns from a draft. For the arguments see `DraftTree.decisions`."""
        for was_sibling_right in rescued:
            self._siblings.observe(1, was_sibling_right)
        self._source.observe(num_decided, num_accepted)
        decided, accepted = self._decided, self._accepted
        for position in range(self._num_positions):
            decided[position] = FORGETTING * decided[position] + (1.0 if position < num_decided else 0.0)
            accepted[position] = FORGETTING * accepted[position] + (1.0 if position < num_accepted else 0.0)
        self._chain = None

    def rank(self, draft: DraftTree) -> tuple[DraftTree, list[float]]:
        """Orders the draft's tokens by the probability that the text goes through them. Returns these as well.

        Parents stay before their children, because no token is likelier than its parent.
        """
        if not draft.parents:
            return draft, self.chain[: len(draft.token_ids)]
        probabilities = self._through(draft)
        order = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)
        return draft.subset(order), [probabilities[index] for index in order]

    def _through(self, draft: DraftTree) -> list[float]:
        """Returns, for each token of a draft with branches, the probability that the text goes through it.

        This is the probability that the text goes through the parent and through none of the siblings before the token,
        times the token's acceptance in this case. It is capped at the probability of the sibling before it, so that the
        order of siblings is kept.
        """
        sibling, chain = self._siblings.mean, self.chain
        found: list[float] = []
        # By parent: (probability that the text goes through the parent and through none of its children so far,
        # probability that it goes through the last of these children).
        left: dict[int, tuple[float, float]] = {}
        for parent, depth in zip(draft.parents, draft.depths(), strict=True):
            if parent in left:
                (reached, limit), chance = left[parent], sibling
            else:
                reached = limit = 1.0 if parent == ROOT else found[parent]
                place = min(depth, len(chain)) - 1
                chance = chain[place] / chain[place - 1] if place else chain[0]
            found.append(min(reached * chance, limit))
            left[parent] = (reached * (1.0 - chance), found[-1])
        return found
