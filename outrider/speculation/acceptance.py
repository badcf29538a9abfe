"""Which draft tokens stand: those that equal what the target's own race decided."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import ROOT


def accept(draft_token_ids: tuple[int, ...], target_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that one verification commits: the agreeing prefix, plus one.

    `target_token_ids` holds len(draft) + 1 decisions of the target; entry j was decided
    after the draft tokens before j. The last token returned is the recovered token at the
    first disagreement, or the bonus token after a draft that agreed throughout.

    Source: coupled sampling; a draft token is accepted if and only if it equals the
    decision of its position, wherever it came from.
    """
    assert len(target_token_ids) == len(draft_token_ids) + 1, "one decision per draft token and one more"
    if target_token_ids[:-1] == draft_token_ids:
        return target_token_ids
    num_accepted = 0
    for draft, decided in zip(draft_token_ids, target_token_ids, strict=False):
        if draft != decided:
            break
        num_accepted += 1
    return target_token_ids[: num_accepted + 1]


def accept_path(
    draft_token_ids: Sequence[int], parents: Sequence[int], target_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """The draft tokens of a tree that stand, by index, from the root on.

    Entry 0 of `target_token_ids` is the decision after the prefix, entry j + 1 the one after the path that ends with
    draft token j. Siblings differ, so at most one of them is what was decided.
    """
    assert len(target_token_ids) == len(draft_token_ids) + 1, "one decision per draft token and one more"
    assert len(parents) == len(draft_token_ids)
    path: list[int] = []
    last = ROOT
    for index, parent in enumerate(parents):  # parents come before their children
        if parent == last and draft_token_ids[index] == target_token_ids[last + 1]:
            path.append(index)
            last = index
    return tuple(path)
