"""The work of one call of a draft model's proposer. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.speculation.path_tree import Decided, DraftPath, PathTree
from outrider.speculation.proposers.draft_forward import PathRows


@dataclass(slots=True)
class Plan:
    """The work of one call of `propose`: at most one forward."""

    rows: list[PathRows] = field(default_factory=list)
    paths: list[tuple[PathTree, DraftPath]] = field(default_factory=list)  # one for each of `rows`
    copies: list[tuple[int, int]] = field(default_factory=list)  # block copies before the forward
    behind: set[int] = field(default_factory=set)  # sequences whose prefix needs another call
    no_room: set[int] = field(default_factory=set)  # sequences whose draft ends here, as no block is free
    looking_ahead: set[int] = field(default_factory=set)  # sequences with something left to draft ahead


def add_decided(tree: PathTree, path: DraftPath, rows: PathRows, decided: Decided) -> None:
    """Adds decided tokens to a path. Drops those of a rollout that would not have been drafted one by one."""
    path.kv.advance(tree.rows_before(rows.start_position + len(rows.token_ids)))
    for index, each in enumerate((decided, *decided.following)):
        if not each.token_ids:
            break
        if index and rows.max_tokens > 1:
            if tree.is_complete(path) or path.confidence < rows.min_reach:
                break
            path.kv.advance(path.kv.num_tokens + 1)  # the token before was fed in the rollout
        path.decided.append(each)
    if path is tree.main:
        path.kv.publish(tree.token_ids)
