"""Estimates how often draft tokens of one proposer are accepted in one sequence, by position."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import ROOT, DraftTree, RankedDraft

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
            self._chain = self._estimate()
        return self._chain

    def observe_chain(self, num_draft: int, num_accepted: int) -> None:
        """Learns how many tokens of a chain were accepted. `num_draft` is at least 1."""
        self._observe(num_accepted + (num_accepted < num_draft), num_accepted)

    def observe_tree(self, draft: DraftTree, accepted: Sequence[int]) -> None:
        """Learns which tokens of a draft with branches were accepted; `accepted`: their indices from the root on."""
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(index)
        num_first = 0  # number of consecutively accepted first children, which a chain would have gained as well
        for place, parent in enumerate((ROOT, *accepted)):
            siblings = children.get(parent, [])
            right = accepted[place] if place < len(accepted) else None
            if len(siblings) > 1 and right != siblings[0]:
                self._siblings.observe(1, right is not None)
            num_first += num_first == place and bool(siblings) and right == siblings[0]
        is_cut_short = bool(children.get(accepted[num_first - 1] if num_first else ROOT))
        self._observe(num_first + is_cut_short, num_first)

    def rank(self, draft: DraftTree) -> RankedDraft:
        """Orders the draft's tokens by the probability that the text goes through them.

        Parents stay before their children, because no token is likelier than its parent.
        """
        if not draft.parents:
            return RankedDraft(draft, self.chain[: len(draft.token_ids)])
        probabilities = self._through(draft)
        order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
        return RankedDraft(draft.subset(order), [probabilities[index] for index in order])

    def _through(self, draft: DraftTree) -> list[float]:
        """Returns, for each token of a draft with branches, the probability that the text goes through it.

        This is the probability that the text goes through the parent and through none of the siblings before the token,
        times the token's acceptance in this case. It is capped at the probability of the sibling before it, so that the
        order of siblings is kept.
        """
        sibling = self._siblings.mean
        found: list[float] = []
        # By parent: (probability that the text goes through the parent and through none of its children so far,
        # probability that it goes through the last of these children).
        left: dict[int, tuple[float, float]] = {}
        for parent, depth in zip(draft.parents, draft.depths(), strict=True):
            if parent in left:
                (reached, limit), chance = left[parent], sibling
            else:
                reached = limit = 1.0 if parent == ROOT else found[parent]
                chance = self._acceptance(depth - 1)
            found.append(min(reached * chance, limit))
            left[parent] = (reached * (1.0 - chance), found[-1])
        return found

    def _acceptance(self, position: int) -> float:
        """Returns the acceptance of the first child at this position, given that the text has reached it."""
        position = min(position, len(self.chain) - 1)
        before = self.chain[position - 1] if position > 0 else 1.0
        return self.chain[position] / before if before else 0.0

    def _observe(self, num_decided: int, num_accepted: int) -> None:
        self._source.observe(num_decided, num_accepted)
        decided, accepted = self._decided, self._accepted
        for position in range(len(decided)):
            one, other = FORGETTING * decided[position], FORGETTING * accepted[position]
            if position < num_decided:
                one += 1.0
                if position < num_accepted:
                    other += 1.0
            decided[position], accepted[position] = one, other
        self._chain = None

    def _estimate(self) -> list[float]:
        decided, accepted = self._decided, self._accepted
        prior = PRIOR_TOKENS * self._source.mean
        overall = (sum(accepted) + prior) / (sum(decided) + PRIOR_TOKENS)
        assumed = POSITION_TOKENS * overall
        probability = 1.0
        chain: list[float] = []
        for position, num_accepted in enumerate(accepted):
            probability *= (num_accepted + assumed) / (decided[position] + POSITION_TOKENS)
            chain.append(probability)
        return chain
