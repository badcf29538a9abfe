"""One draft, from the proposer that made it to the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from outrider.speculation.token_distribution import TokenDistribution

DRAFT_NODE = "draft_node"
"""Source of drafts that came from a draft node; a local proposer's is its name."""

ROOT = -1
"""The parent of a token that follows the prefix itself."""


@dataclass(slots=True)
class DraftTree:
    """Tokens proposed after the first `length` tokens of a text.

    Most are chains: each token follows the one before it. Otherwise `parents` says what each token follows. Tokens are
    in the order of their worth, parents before their children, so the first n of them are a tree as well, and of two
    siblings the first is the likelier one.

    A value: never changed once its source is known. Not declared frozen, as one is made for every sequence and step and
    that would make its construction take three times as long.
    """

    length: int
    prefix_hash: int | None = None  # of those first tokens; None: the draft has not left its proposer's process
    token_ids: tuple[int, ...] = ()
    source: str = DRAFT_NODE  # whose acceptance the verdict counts for
    probability: float = 1.0  # the proposer's estimate that the text begins with those first tokens
    distributions: tuple[TokenDistribution, ...] = ()  # what each token was drawn from; empty: each was certain
    parents: tuple[int, ...] = ()  # of each token the index of its parent, or ROOT; empty: a chain
    grade: int = 0  # the proposer's own measure of the draft, one of few: acceptance counts for each grade by itself

    def __len__(self) -> int:
        """Tokens proposed."""
        return len(self.token_ids)

    @property
    def was_drawn(self) -> bool:
        """Whether it comes with what it was drawn from, for rejection sampling: then it is a chain."""
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
        """Of each token, how many tokens of the draft its path has, itself included."""
        if not self.parents:
            return tuple(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most tokens that follow each other."""
        return max(self.depths(), default=0)

    def path_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The indices of the tokens with which a text that goes on like this follows the draft, from the root on."""
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

    def cut(self, num_tokens: int) -> DraftTree:
        """At most the first `num_tokens` of them."""
        if len(self.token_ids) <= num_tokens:
            return self
        if self.parents:
            return self.only(range(num_tokens))
        return DraftTree(
            self.length,
            self.prefix_hash,
            self.token_ids[:num_tokens],
            self.source,
            self.probability,
            self.distributions[:num_tokens],
            grade=self.grade,
        )

    def depth_first(self) -> DraftTree:
        """The same tree, the likeliest path first, then what branches off, the deepest branch first.

        So tokens that follow each other are neighbours as far as possible.
        """
        if not self.parents:
            return self
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(index)
        order: list[int] = []
        stack = children[ROOT][::-1]
        while stack:
            index = stack.pop()
            order.append(index)
            stack += reversed(children.get(index, ()))
        return self.only(order)

    def only(self, indices: Sequence[int]) -> DraftTree:
        """These tokens of a tree, in this order; those whose parents are not among them follow the root."""
        places = {index: place for place, index in enumerate(indices)}
        parents = tuple(places.get(self.parents[index], ROOT) for index in indices)
        is_chain = all(parent == place - 1 for place, parent in enumerate(parents))
        return replace(
            self,
            token_ids=tuple(self.token_ids[index] for index in indices),
            distributions=tuple(self.distributions[index] for index in indices) if self.distributions else (),
            parents=() if is_chain else parents,
        )

    def after(self, token_ids: Sequence[int]) -> DraftTree | None:
        """What is proposed after `token_ids`, of which the first `length` are known to be the draft's prefix.

        None: the text went on otherwise, or past the draft.
        """
        num_since = len(token_ids) - self.length
        if num_since == 0:
            return self
        if num_since >= len(self.token_ids):
            return None
        if self.parents:
            return self._below(token_ids[self.length :])
        if tuple(token_ids[self.length :]) != self.token_ids[:num_since]:
            return None
        return DraftTree(
            len(token_ids),
            None,
            self.token_ids[num_since:],
            self.source,
            distributions=self.distributions[num_since:],
            grade=self.grade,
        )

    def _below(self, path: Sequence[int]) -> DraftTree | None:
        """What follows these tokens of a tree."""
        root = ROOT
        for token_id in path:
            children = (index for index in range(root + 1, len(self)) if self.parents[index] == root)
            root = next((index for index in children if self.token_ids[index] == token_id), ROOT)
            if root == ROOT:
                return None
        below = {root}
        for index in range(root + 1, len(self.token_ids)):
            if self.parents[index] in below:
                below.add(index)
        below.remove(root)
        if not below:
            return None
        return replace(self.only(sorted(below)), length=self.length + len(path), prefix_hash=None, probability=1.0)


class RankedDraft(NamedTuple):
    """A draft and what is expected of it in the step for which it was ranked: see `DraftController.rank`."""

    tree: DraftTree  # its tokens by falling probability, parents before their children
    probabilities: Sequence[float]  # that the text goes through each token; of a drawn draft also through absent ones


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two texts."""
    return sum(takewhile(bool, map(eq, one, other)))
