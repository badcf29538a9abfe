"""Shapes of draft trees, for tests of everything that a tree passes through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hypothesis import strategies as st

from outrider.speculation.draft_tree import ROOT, DraftTree

SHAPES = {
    "chain": (-1, 0, 1, 2),
    "siblings": (-1, -1, -1),
    "chain_and_siblings": (-1, 0, 1, -1, 0),
    "two_chains": (-1, 0, 1, -1, 3, 4),
    "two_chains_in_turn": (-1, -1, 0, 1, 2, 3),
    "comb": (-1, -1, 0, 0, 2, 2, 4, 4),
    "bush": (-1, 0, 0, 1, 1, 2, 2, 6),
}
"""Each shape's parent indices, by token; -1 is the root."""


MAX_TOKENS = 12
VOCAB_SIZE = 13
"""Number of ids. It is small, so that tokens of different branches are often equal."""


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Draws the parents of a draft's tokens; some drafts are chains."""
    drawn = st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=MAX_TOKENS)
    return drawn.map(
        lambda drawn: tuple(
            index - 1 if number is None else number % (index + 1) + ROOT for index, number in enumerate(drawn)
        )
    )


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Draws a well-formed tree that continues a text of five tokens."""
    shape = draw(shapes())
    drawn_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=len(shape), max_size=len(shape)))
    token_ids: list[int] = []
    for parent, drawn in zip(shape, drawn_ids, strict=True):
        siblings = {token for at, token in zip(shape, token_ids, strict=False) if at == parent}
        token_ids.append(next(each % VOCAB_SIZE for each in count(drawn) if each % VOCAB_SIZE not in siblings))
    return DraftTree(5, 99, tuple(token_ids), parents=() if is_chain(shape) else shape)


def is_chain(parents: Sequence[int]) -> bool:
    return list(parents) == list(range(ROOT, len(parents) - 1))


def parents_of(tree: DraftTree) -> Sequence[int]:
    """Returns each token's parent, or ROOT."""
    return tree.parents or range(ROOT, len(tree) - 1)


def child(tree: DraftTree, parent: int, token_id: int) -> int | None:
    """Returns the index of the child of `parent` with this id, if there is one."""
    keys = list(zip(parents_of(tree), tree.token_ids, strict=True))
    return keys.index((parent, token_id)) if (parent, token_id) in keys else None


def path_to(parents: tuple[int, ...], draft: int) -> list[int]:
    """Returns the indices on the path from the root to this token."""
    path = [draft]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]


def likeliest_path(tree: DraftTree) -> DraftTree:
    """Returns the chain of first children."""
    if not tree.parents:
        return tree
    kept: list[int] = []
    for index in range(len(tree)):
        if tree.parents[index] == (kept[-1] if kept else ROOT):
            kept.append(index)
    return tree.subset(kept)
