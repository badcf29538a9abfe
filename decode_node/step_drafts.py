"""What one step may verify."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.speculation.draft_tree import DraftTree

NO_DRAFT = DraftTree(0)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts by sequence id; sequences without one are absent."""

    trees: Mapping[int, DraftTree] = field(default_factory=dict)
    wanting: frozenset[int] = frozenset()  # sequences that wanted some
    hits: frozenset[int] = frozenset()  # of them, those that found a draft node's waiting for them
    waited_seconds: float = 0.0  # for draft nodes

    def of(self, sequence_id: int) -> DraftTree:
        return self.trees.get(sequence_id, NO_DRAFT)
