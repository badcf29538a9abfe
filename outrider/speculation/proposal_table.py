"""The proposals at hand, found by what has been committed since they were made."""

from __future__ import annotations

from outrider.speculation.draft_stream import Branch
from outrider.speculation.prefix_hash import HashedTokens


class ProposalTable:
    """Branches of each sequence, keyed by content: (length, prefix hash).

    Late, early, re-based and merged proposals are one case: a branch of an older prefix
    still serves if its first tokens equal what was committed since. Bounded: the oldest
    branch of a sequence gives way to the newest. Not thread-safe: confined to its owner's
    thread or lock.
    """

    def __init__(self, *, max_branches_per_sequence: int = 8) -> None:
        self._max_branches = max_branches_per_sequence
        self._branches: dict[int, dict[tuple[int, int], Branch]] = {}

    def __len__(self) -> int:
        """Sequences that have a branch."""
        return len(self._branches)

    def num_branches(self, sequence_id: int) -> int:
        return len(self._branches.get(sequence_id, ()))

    def add(self, sequence_id: int, branch: Branch) -> None:
        """Keeps a branch; a newer one of the same prefix replaces it."""
        if not branch.token_ids:
            return
        branches = self._branches.setdefault(sequence_id, {})
        key = (branch.length, branch.prefix_hash)
        branches.pop(key, None)
        branches[key] = branch
        while len(branches) > self._max_branches:
            del branches[next(iter(branches))]

    def take(self, sequence_id: int, committed: HashedTokens, num_wanted: int) -> tuple[int, ...]:
        """At most `num_wanted` tokens proposed after `committed`; empty when there are none.

        Of several branches that fit, the one made from the longest prefix wins, since it
        saw most. Branches that can serve no more are dropped; the one used stays, because
        what is left of it may fit the next commit as well.
        """
        branches = self._branches.get(sequence_id)
        if not branches:
            return ()
        best: tuple[int, tuple[int, ...]] = (-1, ())
        for key, branch in list(branches.items()):
            rest = _rebase(branch, committed)
            if rest is None:
                del branches[key]
            elif rest and branch.length > best[0]:
                best = (branch.length, rest)
        if not branches:
            del self._branches[sequence_id]
        return best[1][:num_wanted]

    def forget(self, sequence_id: int) -> None:
        """Drops all branches of a sequence; none is fine."""
        self._branches.pop(sequence_id, None)


def _rebase(branch: Branch, committed: HashedTokens) -> tuple[int, ...] | None:
    """What the branch says after `committed`.

    Empty: nothing yet, its prefix is still ahead of us. None: nothing ever, it is spent or
    was about another text.
    """
    num_since = len(committed) - branch.length
    if num_since < 0:
        return ()
    if num_since >= len(branch.token_ids):
        return None
    if tuple(committed.token_ids[branch.length :]) != branch.token_ids[:num_since]:
        return None
    if committed.hash_at(branch.length) != branch.prefix_hash:
        return None
    return branch.token_ids[num_since:]
