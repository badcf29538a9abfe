"""Chooses the paths of a look-ahead's next forward: the likeliest ones, shared equally among decode nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outrider.speculation.draft_tree import num_common
from outrider.speculation.path_tree import DraftPath, Opening, PathTree

MIN_PROBABILITY = 0.005
"""Probability below which a token is not worth a row, even if the draft node is idle."""


@dataclass(frozen=True, slots=True)
class AheadRow:
    """A path that could be drafted next."""

    owner: int
    probability: float  # probability that the text reaches the path's next token
    tree: PathTree
    path: DraftPath | Opening
    max_tokens: int = 1  # number of tokens that the path may still grow
    is_wanted: bool = False  # whether the next token is part of the draft that was asked for


def num_verified(tree: PathTree, num_wanted: int) -> int:
    """Returns how many of the main path's tokens the target may accept: `num_wanted` unless it is known."""
    if tree.verified is None:
        return num_wanted
    num_agreeing = num_common(tree.main.token_ids, tree.verified)
    return num_agreeing if num_agreeing < len(tree.main) else len(tree.verified)


def candidate_rows(tree: PathTree, *, owner: int, num_wanted: int, max_alternatives: int) -> list[AheadRow]:
    """Returns the paths of one sequence that may still grow, as its next update may ask for their tokens.

    While the target verifies `num_wanted` tokens, the main path grows until it has these tokens, one more, and a whole
    next draft. An alternative replaces one of these `num_wanted` + 1 tokens, and grows by a whole draft. If the target
    verifies `tree.verified` instead, its first token that is not on the main path begins an alternative as well.
    """
    num_first, verified = num_verified(tree, num_wanted), tree.verified or ()
    acceptance = tree.acceptance.mean
    rows: list[AheadRow] = []
    for path in tree.paths:
        num_tokens = len(path)
        if tree.num_missing(path) > tree.max_path_rows:
            continue  # the path's KV was evicted, or the path feeds too many rows of its own
        if path.num_assumed > num_first + 1:
            continue  # the target accepts fewer tokens of the main path
        max_tokens = num_first + 1 + num_wanted if path is tree.main else path.num_assumed + num_wanted
        if num_tokens >= max_tokens or tree.is_complete(path):
            continue
        is_wanted = path is tree.main and num_tokens < num_wanted
        probability = tree.probability(path, num_tokens) * acceptance
        rows.append(AheadRow(owner, probability, tree, path, max_tokens - num_tokens, is_wanted))
    num_open = len([path for path in tree.alternatives if path.num_assumed <= num_first + 1])
    num_left = max_alternatives - num_open if tree.num_left > 1 else 0
    is_other = num_first < min(len(verified), len(tree.main))
    openings = tree.openings(num_first + 1, verified=verified[num_first] if is_other else None)
    rows += [
        AheadRow(owner, opening.probability * acceptance, tree, opening, num_wanted)
        for opening in openings[: max(0, num_left)]
    ]
    return [row for row in rows if row.is_wanted or row.probability >= MIN_PROBABILITY]


def round_robin(rows: Iterable[AheadRow]) -> Iterator[AheadRow]:
    """Yields the likeliest row of each owner, then the second likeliest of each, and so on."""
    by_owner: dict[int, list[AheadRow]] = {}
    for row in sorted(rows, key=lambda row: -row.probability):
        by_owner.setdefault(row.owner, []).append(row)
    for place in range(max(map(len, by_owner.values()), default=0)):
        yield from (owned[place] for owned in by_owner.values() if place < len(owned))
