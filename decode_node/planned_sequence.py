"""One sequence's share of a step: which rows it feeds, and what they verify."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from decode_node.groups import Sample
from outrider.engine.input_batch import SequenceRows
from outrider.engine.sampler import SampleRows
from outrider.engine.scheduler import Scheduled
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.verify.base import DraftRows, Verified


class PlannedSequence(NamedTuple):
    """What was scheduled, for which sample, and the draft that is verified: as much of it as got rows."""

    scheduled: Scheduled
    sample: Sample
    draft: DraftTree

    def rows(self) -> SequenceRows:
        """Tokens without KV, then the draft tokens."""
        sequence, draft, num_rows = self.scheduled.sequence, self.draft, self.scheduled.num_rows
        kv, known = sequence.kv, sequence.token_ids
        assert kv is not None
        start = kv.num_tokens
        return SequenceRows(
            (*known[start : start + num_rows], *draft.token_ids) if num_rows > 1 else (known[start], *draft.token_ids),
            start,
            kv.block_table(),
            1 + len(draft.token_ids) if self.scheduled.reaches_end else 0,
            draft.parents,
        )

    def draft_rows(self) -> DraftRows:
        """What the verifier decides: what follows the known tokens, and what follows each draft token."""
        sample, draft = self.sample, self.draft
        rows = SampleRows(sample.sampling, len(sample.sequence.token_ids), draft.token_ids)
        return DraftRows(rows, draft.distributions, sample.group.opened.verification_method, draft.parents)

    def moved_slots(self, outcome: Verified) -> Iterator[tuple[int, int]]:
        """Accepted tokens of a tree that do not lie where their positions are: (source, destination) slots."""
        kv = self.scheduled.sequence.kv
        assert kv is not None
        first = len(self.scheduled.sequence.token_ids)
        for place, index in enumerate(outcome.path):
            if index != place:
                yield kv.slot(first + index), kv.slot(first + place)


def granted(draft: DraftTree, scheduled: Scheduled) -> DraftTree:
    """As much of a chosen draft as got rows, in the order of the rows."""
    if len(draft.token_ids) > scheduled.num_draft_tokens:
        draft = draft.cut(scheduled.num_draft_tokens)
    return draft.depth_first() if draft.parents else draft
