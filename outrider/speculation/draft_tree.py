"""One draft, from the proposer that made it to the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from outrider.speculation.token_distribution import TokenDistribution

DRAFT_NODE = "draft_node"
"""The source of drafts that come from draft nodes. The source of a local proposer's drafts is the proposer's name."""

ROOT = -1
"""The parent of a token that follows the prefix itself."""


@dataclass(slots=True)
class DraftTree:
    """Tokens proposed after the first `length` tokens of a text.

    Most drafts are chains: each token follows the one before it. Otherwise `parents` gives each token's parent.
    Tokens are ordered by probability and parents come before their children. So the first n tokens are a tree as
    well, and the first of two siblings is the likelier one.

    A tree is never changed once its source is known. The class is not declared frozen, because a tree is made for every
    sequence in every step, and the construction of a frozen object takes three times as long.
    """

    length: int
    prefix_hash: int | None = None  # hash of the first `length` tokens; None: the draft was made in this process
    token_ids: tuple[int, ...] = ()
    source: str = DRAFT_NODE  # the source whose acceptance the verdict changes
    probability: float = 1.0  # the proposer's estimated probability that the text begins with the prefix
    distributions: tuple[TokenDistribution, ...] = ()  # one for each token; empty: nothing was drawn
    parents: tuple[int, ...] = ()  # index of each token's parent, or ROOT; empty: a chain
    grade: int = 0  # class of the proposer's confidence in the draft; each class has its own acceptance

    def __len__(self) -> int:
        """The number of tokens proposed."""
        return len(self.token_ids)

    @property
    def was_drawn(self) -> bool:
        """Whether the draft has the distributions of its tokens, for rejection sampling. If so, it is a chain."""
        return bool(self.distributions)

    @property
    def is_well_formed(self) -> bool:
        """Whether parents, if there are any, come before their children, and siblings differ."""
        if not self.parents:
            return True
        return (
            len(self.parents) == len(self.token_ids)
            and all(ROOT <= parent < index for index, parent in enumerate(self.parents))
            and len(set(zip(self.parents, self.token_ids, strict=True))) == len(self.token_ids)
        )

    def depths(self) -> tuple[int, ...]:
        """Returns the length of each token's path from the root, the token included."""
        if not self.parents:
            return tuple(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return max(self.depths(), default=0) if self.parents else len(self.token_ids)

    def likeliest_path(self) -> tuple[int, ...]:
        """Returns the tokens of the path that follows the first of siblings everywhere."""
        if not self.parents:
            return self.token_ids
        path, last = [], ROOT
        for index, parent in enumerate(self.parents):
            if parent == last:
                path.append(self.token_ids[index])
                last = index
        return tuple(path)

    def path_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the indices of the tokens that a text with this continuation shares with the draft, in order."""
        if not self.parents:
            return range(num_common(self.token_ids, token_ids))
        path: list[int] = []
        children = {key: index for index, key in enumerate(zip(self.parents, self.token_ids, strict=True))}
        for token_id in token_ids:
            index = children.get((path[-1] if path else ROOT, token_id))
            if index is None:
                break
            path.append(index)
        return path

    def decisions(self, accepted: Sequence[int], num_known: int) -> tuple[int, int, Sequence[bool]]:
        """Returns what a text of `num_known` tokens, which goes through the tokens `accepted`, says about the draft.

        `accepted`: indices of tokens, from the root on.

        Returns:
            The number of first children that were decided, one after the other from the root on, as in a chain; how
            many of them were right; and for each wrong first child with siblings whether a sibling was right.
        """
        if not self.parents:
            return min(len(accepted) + 1, len(self.token_ids), num_known), len(accepted), ()
        children, num_decided, num_right = self._children(), 0, 0
        rescued: list[bool] = []
        for place, parent in enumerate((ROOT, *accepted)[:num_known]):
            siblings = children.get(parent)
            if siblings is None:
                break
            is_right = siblings[0] in accepted
            if num_right == place:
                num_decided += 1
                num_right += is_right
            if not is_right and len(siblings) > 1:
                rescued.append(place < len(accepted))
        return num_decided, num_right, rescued

    def cut(self, num_tokens: int) -> DraftTree:
        """Returns the draft's first `num_tokens` tokens; all if it has fewer."""
        if len(self.token_ids) <= num_tokens:
            return self
        return DraftTree(
            self.length,
            self.prefix_hash,
            self.token_ids[:num_tokens],
            self.source,
            self.probability,
            self.distributions[:num_tokens],
            unless_chain(self.parents[:num_tokens]),
            self.grade,
        )

    def depth_first(self) -> DraftTree:
        """Returns the same tree in depth-first order: the likeliest path, then the branches, the deepest first.

        Tokens that follow each other thus become neighbours as far as possible.
        """
        if not self.parents:
            return self
        children = self._children()
        order: list[int] = []
        stack = children[ROOT][::-1]
        while stack:
            index = stack.pop()
            order.append(index)
            stack += reversed(children.get(index, ()))
        return self.subset(order)

    def subset(self, indices: Sequence[int]) -> DraftTree:
        """Returns these tokens of a tree, in this order; tokens whose parents are not among them follow the root."""
        if list(indices) == list(range(len(self.token_ids))):
            return self
        places = {index: place for place, index in enumerate(indices)}
        return DraftTree(
            self.length,
            self.prefix_hash,
            tuple([self.token_ids[index] for index in indices]),
            self.source,
            self.probability,
            tuple([self.distributions[index] for index in indices]) if self.distributions else (),
            unless_chain(tuple([places.get(self.parents[index], ROOT) for index in indices])),
            self.grade,
        )

    def after(self, token_ids: Sequence[int]) -> DraftTree | None:
        """Returns the rest of the draft after `token_ids`, whose first `length` tokens must be the draft's prefix.

        Returns None if the text differs from the draft or is past its end.
        """
        num_since = len(token_ids) - self.length
        if num_since == 0:
            return self
        if num_since >= len(self.token_ids):
            return None
        path = self.path_of(token_ids[self.length :])
        if len(path) < num_since:
            return None
        if not self.parents:
            return DraftTree(
                len(token_ids),
                None,
                self.token_ids[num_since:],
                self.source,
                distributions=self.distributions[num_since:],
                grade=self.grade,
            )
        below = {path[-1]}
        for index in range(path[-1] + 1, len(self.token_ids)):
            if self.parents[index] in below:
                below.add(index)
        below.remove(path[-1])
        if not below:
            return None
        return replace(self.subset(sorted(below)), length=len(token_ids), prefix_hash=None, probability=1.0)

    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(index)
        return children


class RankedDraft(NamedTuple):
    """A draft and its tokens' probabilities in the step for which it was ranked (see `DraftController.rank`)."""

    tree: DraftTree  # with its tokens ordered by falling probability, parents before their children
    probabilities: Sequence[float]  # one for each token that may be verified; see `DraftController.rank`
    gain: float  # tokens that the draft is expected to gain, minus the price of their rows

    @property
    def value(self) -> tuple[float, float]:
        """What the best of several drafts of a sequence has most of."""
        return self.gain, sum(self.probabilities)


def unless_chain(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the parents, or none if each token follows the one before it."""
    return () if parents == tuple(range(ROOT, len(parents) - 1)) else parents


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of two texts."""
    return sum(takewhile(bool, map(eq, one, other)))
