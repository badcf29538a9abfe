"""Shapes of draft trees, for tests of everything that a tree passes through."""

from __future__ import annotations

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
"""Parents of each draft."""


@st.composite
def shapes(draw: st.DrawFn, max_tokens: int = 12) -> tuple[int, ...]:
    """Parents of each draft, chains among them."""
    return tuple(
        draw(st.one_of(st.just(index - 1), st.integers(ROOT, index - 1)))
        for index in range(draw(st.integers(1, max_tokens)))
    )


@st.composite
def trees(draw: st.DrawFn, max_tokens: int = 12, vocab_size: int = 30, length: int = 5) -> DraftTree:
    """Well-formed ones."""
    shape = draw(shapes(max_tokens))
    token_ids: list[int] = []
    for parent in shape:
        siblings = {token for at, token in zip(shape, token_ids, strict=False) if at == parent}
        token_ids.append(draw(st.integers(0, vocab_size - 1).filter(lambda token, taken=siblings: token not in taken)))
    is_chain = shape == tuple(range(-1, len(shape) - 1))
    return DraftTree(length, 99, tuple(token_ids), parents=() if is_chain else shape)


def path_to(parents: tuple[int, ...], draft: int) -> list[int]:
    """The drafts from the root to this one."""
    path = [draft]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]


def likeliest_path(tree: DraftTree) -> DraftTree:
    """The first child of each token, as a chain."""
    if not tree.parents:
        return tree
    kept: list[int] = []
    for index in range(len(tree)):
        if tree.parents[index] == (kept[-1] if kept else ROOT):
            kept.append(index)
    return tree.in_order(kept)
