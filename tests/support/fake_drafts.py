"""A draft client that makes its drafts itself."""

from __future__ import annotations

from outrider.drafting.book import StepDrafts
from outrider.drafting.exchange import NO_TABLES
from outrider.speculation.draft_tree import DraftTree


class NoDrafts:
    """A draft client that never drafts."""

    needs_features = False

    def open(self, sequence_id, start, token_ids, *, num_wanted):
        return

    def commit(self, updates, _tables=NO_TABLES, *, min_reach=0.0, wakes=True):
        return

    def begin_step(self, verified):
        return

    def wake(self):
        return

    def close(self, sequence_id):
        return

    def take(self, sequence_ids, *, wait_seconds):
        return StepDrafts()

    def observe_step(self, seconds):
        return


class TextDrafts(NoDrafts):
    """Proposes what `propose(token_ids, num_wanted)` returns: token ids, a DraftTree, or None for no draft.

    `announced` holds (sample, known tokens) of every open sequence.
    """

    def __init__(self, propose=lambda _token_ids, _num_wanted: ()):
        self.propose = propose
        self.announced = {}
        self._texts = {}
        self._wanted = {}

    def open(self, sequence_id, start, token_ids, *, num_wanted):
        self.announced[sequence_id] = (start.sample, tuple(token_ids))
        self._texts[sequence_id], self._wanted[sequence_id] = list(token_ids), num_wanted

    def commit(self, updates, _tables=NO_TABLES, *, min_reach=0.0, wakes=True):
        for sequence_id, token_ids, num_wanted in updates:
            self._texts[sequence_id] += token_ids
            self._wanted[sequence_id] = num_wanted

    def close(self, sequence_id):
        self.announced.pop(sequence_id, None)

    def take(self, sequence_ids, *, wait_seconds):
        requested = {each for each in sequence_ids if self._wanted.get(each, 0) > 0}
        drafts = {each: self._draft(each) for each in sequence_ids if each in requested}
        found = {key: tree for key, tree in drafts.items() if tree is not None}
        return StepDrafts(found, requested=requested, awaited=set(requested))

    def _draft(self, sequence_id):
        token_ids, num_wanted = self._texts[sequence_id], self._wanted[sequence_id]
        proposed = self.propose(list(token_ids), num_wanted)
        if proposed is None or isinstance(proposed, DraftTree):
            return proposed
        return DraftTree(len(token_ids), token_ids=tuple(proposed))
