"""A decode loop driven by hand: its commands and its events."""

from __future__ import annotations

import itertools

from decode_node.commands import RouterCommand
from outrider.request import RequestOptions, SamplingParams
from outrider.session import (
    CancelSequenceGroup,
    OpenSequenceGroup,
    RetargetSequenceGroup,
    SampleStart,
    SampleTokens,
)
from tests.support.pool_integrity import check_pool

SESSION = 1


class DrivenNode:
    """Subclasses set `loop`, `groups` and `engine`, define `iterate`, and pass events to `_emit`."""

    prompt: tuple[int, ...]  # the default prompt of groups
    max_tokens: int
    reached_host: str

    def __init__(self):
        self.events = []
        self.stats = []
        self._ids = itertools.count(1)

    def _emit(self, events, stats):
        self.events += itertools.chain.from_iterable(events.values())
        if stats is not None:
            self.stats.append(stats)

    @property
    def num_preempted(self):
        return sum(len(stats.preempted_groups) for stats in self.stats)

    @property
    def num_rows(self):
        return sum(stats.num_rows for stats in self.stats)

    @property
    def num_drafted(self):
        return sum(sum(stats.num_draft_tokens_by_source.values()) for stats in self.stats)

    @property
    def num_accepted(self):
        return sum(sum(stats.num_accepted_by_source.values()) for stats in self.stats)

    def run(self, *, max_turns=2000):
        """Iterates until no work is left."""
        self.iterate()
        for _ in range(max_turns):
            if not self.engine.scheduler.has_work:
                return self
            self.iterate()
        raise AssertionError("the loop does not end")

    def submit(self, command):
        self.loop.submit(command)

    def open(self, *, prompt=None, session=SESSION, transfer_id=None, sampling=None, samples=None, **fields):
        group_id = next(self._ids).to_bytes(16, "big")
        sampling = {"seed": 7, "max_tokens": self.max_tokens, "temperature": 0.0, **(sampling or {})}
        group = OpenSequenceGroup(
            sequence_group_id=group_id,
            transfer_id=group_id[::-1] if transfer_id is None else transfer_id,
            request_id="r",
            prompt_token_ids=self.prompt if prompt is None else prompt,
            samples=samples or tuple(map(SampleStart, range(sampling.get("n", 1)))),
            options=RequestOptions(sampling=SamplingParams(**sampling), **fields),
        )
        self.submit(RouterCommand(session, group, self.reached_host))
        return group_id

    def cancel(self, group_id, *samples, session=SESSION):
        cancel = CancelSequenceGroup(sequence_group_id=group_id, samples=samples)
        self.submit(RouterCommand(session, cancel))

    def retarget(self, group_id, transfer_id, *, keeps_received=False):
        retarget = RetargetSequenceGroup(
            sequence_group_id=group_id, transfer_id=transfer_id, keeps_received=keeps_received
        )
        self.submit(RouterCommand(SESSION, retarget))

    def find(self, kind, group_id):
        return [event for event in self.events if isinstance(event, kind) and event.sequence_group_id == group_id]

    def tokens(self, group_id, sample=0):
        tokens = [event for event in self.find(SampleTokens, group_id) if event.sample == sample]
        for event in tokens:
            counts = event.speculation
            num_rejected = counts.num_draft_tokens - counts.num_accepted_draft_tokens
            assert len(event.rejected_draft_token_ids) == num_rejected
        return [token_id for event in tokens for token_id in event.token_ids]

    def assert_nothing_is_held(self):
        pool = self.engine.pool
        check_pool(pool, ())
        assert pool.num_free_blocks == pool.num_blocks
        assert self.groups.num_groups == 0
        assert len(self.groups._reservations) == 0
