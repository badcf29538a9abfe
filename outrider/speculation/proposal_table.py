"""The drafts received for one sequence. A draft is found by the tokens that were committed after it was made."""

from __future__ import annotations

from typing import NamedTuple

from outrider.speculation.draft_stream import MAX_BRANCH_TOKENS, MAX_BRANCHES_PER_SEQUENCE
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens


class KeptDraft(NamedTuple):
    """A draft, and the time at which it was received, in seconds of the clock of the table's owner."""

    tree: DraftTree
    arrived_at: float


class ProposalTable:
    """Drafts of one sequence, keyed by content: (length, prefix hash).

    Late and early proposals are treated alike: a draft of an older prefix is still used if its first tokens equal those
    committed since, and a draft of a prefix that is not committed yet may be used later. The table is bounded: stale
    drafts are evicted first, then the least likely one. A look-up compares at most `max_trees` drafts. Not thread-safe:
    it is used only in its owner's thread or under its owner's lock.
    """

    __slots__ = ("_kept", "_max_trees")

    def __init__(self, *, max_trees: int = MAX_BRANCHES_PER_SEQUENCE) -> None:
        self._max_trees = max_trees
        self._kept: dict[tuple[int, int | None], KeptDraft] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tree: DraftTree, committed: HashedTokens, *, now: float) -> None:
        """Keeps a draft, which must have a prefix hash. It replaces an older draft of the same prefix."""
        if not tree.token_ids:
            return
        kept, key = self._kept, (tree.length, tree.prefix_hash)
        before = kept.pop(key, None)
        is_known = before is not None and before.tree.token_ids == tree.token_ids
        kept[key] = KeptDraft(tree, before.arrived_at if before is not None and is_known else now)
        if len(kept) > self._max_trees:
            self._drop_stale(committed)
            while len(kept) > self._max_trees:
                del kept[min(kept, key=lambda key: kept[key].tree.probability)]

    def take(self, committed: HashedTokens) -> KeptDraft | None:
        """Returns the draft after `committed`, or None if there is none.

        If several drafts fit, the one with the longest prefix is taken, because its proposer knew the most tokens. It
        stays in the table, because its rest may fit after the next commit as well.
        """
        num_committed = len(committed.token_ids)
        newest = self._kept.get((num_committed, committed.hash))
        if newest is not None:
            return newest
        lengths = [length for length, _ in self._kept if num_committed - MAX_BRANCH_TOKENS < length < num_committed]
        for length in sorted(lengths, reverse=True):
            kept = self._kept.get((length, committed.hash_at(length)))
            rest = None if kept is None else kept.tree.after(committed.token_ids)
            if kept is not None and rest is not None:
                return KeptDraft(rest, kept.arrived_at)
        return None

    def clear(self) -> None:
        self._kept.clear()

    def _drop_stale(self, committed: HashedTokens) -> None:
        """Evicts drafts whose prefix or tokens differ from the text, and drafts that do not go beyond the text."""
        for key, kept in list(self._kept.items()):
            tree = kept.tree
            if tree.length <= len(committed) and (
                tree.after(committed.token_ids) is None or committed.hash_at(tree.length) != tree.prefix_hash
            ):
                del self._kept[key]
