"""DraftTree: the rest of a draft after it is cut and after the text has grown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.draft_tree import ROOT, DraftTree
from tests.speculation.draft_trees import likeliest_path, parents_of, trees


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Returns the tokens on the path from the root to each token."""
    found: list[tuple[int, ...]] = []
    for parent, token_id in zip(parents_of(tree), tree.token_ids, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token_id))
    return found


FORKED = DraftTree(2, 7, (1, 2, 3, 4, 5), parents=(-1, 0, -1, 1, 2))
"""A tree of two branches: 1 → 2 → 4 and 3 → 5."""


def test_depth_first_order_keeps_paths_together() -> None:
    assert FORKED.depth_first() == DraftTree(2, 7, (1, 2, 4, 3, 5), parents=(-1, 0, 1, -1, 3))


def test_what_is_left_of_a_tree_after_a_commit() -> None:
    assert FORKED.after([0, 0, 3]) == DraftTree(3, None, (5,))
    assert FORKED.after([0, 0, 1]) == DraftTree(3, None, (2, 4))
    assert FORKED.after([0, 0, 3, 5]) is None
    assert FORKED.after([0, 0, *range(1000)]) is None
    assert FORKED.after([0, 0, 4]) is None
    assert FORKED.after([0, 0]) is FORKED


def test_trees_that_contradict_themselves() -> None:
    assert FORKED.is_well_formed
    assert not DraftTree(0, token_ids=(1, 2), parents=(-1,)).is_well_formed
    assert not DraftTree(0, token_ids=(1, 2), parents=(1, -1)).is_well_formed
    assert not DraftTree(0, token_ids=(1, 2), parents=(-2, -1)).is_well_formed
    assert not DraftTree(0, token_ids=(1, 1), parents=(-1, -1)).is_well_formed


@given(tree=trees(), num_tokens=st.integers(0, 12))
def test_a_cut_tree_is_a_tree_of_its_first_tokens(tree: DraftTree, num_tokens: int) -> None:
    cut = tree.cut(num_tokens)
    assert cut.is_well_formed
    assert paths(cut) == paths(tree)[:num_tokens]
    assert cut.depths() == tuple(map(len, paths(cut)))


@given(tree=trees())
def test_order_does_not_change_what_is_proposed(tree: DraftTree) -> None:
    ordered = tree.depth_first()
    assert ordered.is_well_formed
    assert sorted(paths(ordered)) == sorted(paths(tree))
    assert paths(ordered)[: len(likeliest_path(tree))] == paths(likeliest_path(tree))


@given(tree=trees(), data=st.data())
def test_a_text_decides_a_draft_only_as_far_as_it_reaches(tree: DraftTree, data: st.DataObject) -> None:
    """Tokens deeper than the known ones might as well not be there."""
    text = data.draw(st.lists(st.sampled_from(tree.token_ids), max_size=4) | st.sampled_from(paths(tree)))
    known = [index for index, depth in enumerate(tree.depths()) if depth <= len(text)]
    if known:
        part = tree.subset(known) if tree.parents else tree.cut(len(text))
        *said, rescued = tree.decisions(tree.path_of(text), len(text))
        *said_of_part, rescued_of_part = part.decisions(part.path_of(text), 99)
        assert (said, list(rescued)) == (said_of_part, list(rescued_of_part))


def test_what_a_text_says_about_a_tree() -> None:
    tree = DraftTree(0, None, (10, 11, 12, 13, 14), parents=(ROOT, ROOT, 0, 0, 2))  # 10 → 12 → 14, siblings 11 and 13
    said = {path: tree.decisions(path, 3) for path in ((), (1,), (0,), (0, 3), (0, 2, 4))}
    assert said == {
        (): (1, 0, [False]),
        (1,): (1, 0, [True]),
        (0,): (2, 1, [False]),
        (0, 3): (2, 1, [True]),
        (0, 2, 4): (3, 3, []),
    }


@given(tree=trees(), data=st.data())
def test_what_follows_a_path_of_a_tree(tree: DraftTree, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(tree)))
    expected = [other[len(path) :] for other in paths(tree) if other[: len(path)] == path and len(other) > len(path)]
    rest = tree.after([0] * tree.length + list(path))
    assert (paths(rest) if rest else []) == expected
    assert rest is None or (rest.length == tree.length + len(path) and rest.is_well_formed)


@pytest.mark.parametrize(
    ("parents", "token_ids", "path"),
    [
        ((), (10, 11, 12, 13), [0, 1, 2]),
        ((), (10, 9, 12), [0]),
        ((), (9,), []),
        ((ROOT, ROOT, 1), (11, 12, 13), [1, 2]),
        ((ROOT, ROOT, 1), (10, 12), [0]),
    ],
)
def test_the_path_of_a_text_is_what_it_has_of_the_draft(parents, token_ids, path):
    assert list(DraftTree(3, token_ids=(10, 11, 12), parents=parents).path_of(token_ids)) == path


def test_the_likeliest_path_takes_the_first_of_siblings():
    assert DraftTree(3, token_ids=(5, 6, 7)).likeliest_path() == (5, 6, 7)
    tree = DraftTree(3, token_ids=(5, 6, 7, 8, 9), parents=(-1, -1, 1, 0, 0))
    assert tree.likeliest_path() == (5, 8)
    assert tree.depth_first().likeliest_path() == (5, 8)
    assert DraftTree(3).likeliest_path() == ()
