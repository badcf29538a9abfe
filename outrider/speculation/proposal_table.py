"""The proposals at hand for one sequence, found by what has been committed since they were made."""

from __future__ import annotations

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens


class ProposalTable:
    """Drafts of one sequence, keyed by content: (length, prefix hash).

    Late, early, re-based and merged proposals are one case: a draft of an older prefix
    still serves if its first tokens equal what was committed since. Bounded: the oldest
    draft gives way to the newest. Not thread-safe: confined to its owner's thread or lock.
    """

    __slots__ = ("_max_trees", "_trees")

    def __init__(self, *, max_trees: int = 8) -> None:
        self._max_trees = max_trees
        self._trees: dict[tuple[int, int | None], DraftTree] = {}

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, tree: DraftTree) -> None:
        """Keeps a draft that came with its prefix hash; a newer one of the same prefix replaces it."""
        if not tree:
            return
        key = (tree.length, tree.prefix_hash)
        self._trees.pop(key, None)
        self._trees[key] = tree
        while len(self._trees) > self._max_trees:
            del self._trees[next(iter(self._trees))]

    def take(self, committed: HashedTokens, num_wanted: int) -> DraftTree | None:
        """At most `num_wanted` tokens proposed after `committed`; None when there are none.

        Of several drafts that fit, the one made from the longest prefix wins, since it
        saw most. Drafts that can serve no more are dropped; the one used stays, because
        what is left of it may fit the next commit as well.
        """
        best: DraftTree | None = None
        best_length = -1
        for key, tree in list(self._trees.items()):
            if tree.length > len(committed):
                continue  # its prefix is still ahead of us
            rest = tree.after(committed.token_ids)
            if rest is None or committed.hash_at(tree.length) != tree.prefix_hash:
                del self._trees[key]
            elif tree.length > best_length:
                best, best_length = rest, tree.length
        return None if best is None else best.cut(num_wanted)

    def clear(self) -> None:
        self._trees.clear()
