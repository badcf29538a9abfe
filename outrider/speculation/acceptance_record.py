"""Estimates how often draft tokens of one proposer are accepted in one sequence, by position."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import ROOT, DraftTree, RankedDraft

PRIOR_ACCEPTANCE = 0.8
"""The acceptance that is assumed of a new proposer. It is high, so that first drafts are long."""

PRIOR_TOKENS = 8.0
"""The weight, in draft tokens, of what is assumed of a sequence or a proposer."""

POSITION_TOKENS = 8.0
"""The weight, in draft tokens, of a sequence's overall acceptance in that of one position."""

SIBLING_ACCEPTANCE = 0.3
SIBLING_TOKENS = 4.0
"""The acceptance that is assumed of a sibling when those before it were wrong, and its weight in draft tokens."""

PATH_ACCEPTANCE = 0.7
PATH_TOKENS = 4.0
PATH_FORGETTING = 0.97
"""The acceptance that a draft model assumes of its tokens when it looks ahead, its weight in draft tokens, and the
share of their weight that older tokens keep at each new one."""

PRIOR_RUNNERS_UP = (0.5, 0.2, 0.1)
"""The assumed chance of each runner-up of a drafter's race if the winner was wrong. In simulations at temperature 1
with 32k ids, the first one, two and four of a coupled race contain the target's token at .84, .95 and .99 of all
positions.
"""

NUM_RUNNERS_UP = len(PRIOR_RUNNERS_UP)

FORGETTING = 0.95
"""The share of their weight that a sequence's older drafts keep at each new one."""

SOURCE_FORGETTING = 0.995
"""The same for a proposer's drafts over all sequences."""


class Acceptance:
    """The mean acceptance of draft tokens. Older ones weigh less at each observation. Not thread-safe."""

    __slots__ = ("_forgetting", "_num_accepted", "_num_decided", "_prior", "_prior_tokens")

    def __init__(
        self,
        prior: float = PRIOR_ACCEPTANCE,
        *,
        prior_tokens: float = PRIOR_TOKENS,
        forgetting: float = SOURCE_FORGETTING,
    ) -> None:
        """`prior`: the acceptance that is assumed; `prior_tokens`: its weight in draft tokens.

        The defaults are for a proposer's drafts over all sequences, which say what a new sequence is assumed to accept.
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
    """Returns the mean for a draft model's tokens in one sequence, or for its runners-up of one rank after a miss."""
    return Acceptance(prior, prior_tokens=PATH_TOKENS, forgetting=PATH_FORGETTING)


class AcceptanceRecord:
    """Acceptance by position for one sequence and one proposer's drafts of one grade. Not thread-safe.

    A position counts as decided if the text has reached it: a draft that was rejected before it says nothing about it
    (the product-limit estimate, Kaplan and Meier 1958, with exponential forgetting). The estimate of a position leans
    on the sequence's overall acceptance, and that on the proposer's over all sequences. So a position that was not
    reached for a long time is assumed to be like the others, and is tried again.
    """

    __slots__ = ("_accepted", "_chain", "_decided", "_num_positions", "_siblings", "_source", "last_step")

    def __init__(self, source: Acceptance, num_positions: int, *, step: int) -> None:
        self._source = source
        self._num_positions = num_positions
        self.last_step = step  # last step in which a draft was verified
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets everything observed so far, as the text may have changed."""
        self._decided = [0.0] * self._num_positions
        self._accepted = [0.0] * self._num_positions
        # Over tokens that were wrong and had a sibling.
        self._siblings = Acceptance(SIBLING_ACCEPTANCE, prior_tokens=SIBLING_TOKENS, forgetting=FORGETTING)
        self._chain: list[float] | None = None

    @property
    def chain(self) -> list[float]:
        """The probability that a chain is accepted up to each position; it never rises."""
        if self._chain is None:
            self._chain = self._estimate()
        return self._chain

    def observe_chain(self, num_draft: int, num_accepted: int) -> None:
        """Learns from the verdict on a chain; `num_draft` is at least 1."""
        self._observe(num_accepted + (num_accepted < num_draft), num_accepted)

    def observe_tree(self, draft: DraftTree, accepted: Sequence[int]) -> None:
        """Learns from the verdict on a draft with branches: the indices of accepted tokens, from the root on."""
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(index)
        num_first = 0  # consecutively accepted first children: what a chain would have gained
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

        Parents stay before their children: no token is likelier than its parent.
        """
        if not draft.parents:
            return RankedDraft(draft, self.chain[: len(draft.token_ids)])
        probabilities = self._through(draft)
        order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
        return RankedDraft(draft.only(order), [probabilities[index] for index in order])

    def _through(self, draft: DraftTree) -> list[float]:
        """Returns the probability of each token of a draft with branches.

        It is the probability of the parent, times that of the token after its siblings failed. A sibling's is capped
        by that of the one before it, so that their order stays.
        """
        sibling = self._siblings.mean
        found: list[float] = []
        # By parent: (the probability that the text reaches it and none of its children so far, that of its last child).
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
        """Returns the acceptance of the first child at this position, once the text has reached it."""
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
