"""A draft client that asks its nodes only as long as that makes this node faster: they compute on its processors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from decode_node.drafts import DEFAULT_NUM_WANTED, DraftClient, DraftClientStatus, DraftWant, NoDrafts
from decode_node.step_drafts import StepDrafts
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.drafting_trial import DraftingTrial


class DraftsOnTrial(NoDrafts):
    """While its nodes are not asked they know of no sequence, so they compute nothing. Threads as in DraftClient."""

    def __init__(
        self,
        client: DraftClient | NoDrafts,
        *,
        trial: DraftingTrial | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._trial = trial or DraftingTrial()
        self._clock = clock
        self._starts: dict[int, SequenceStart] = {}
        self._announced: set[int] = set()
        self._num_tokens = 0
        self._num_sequences = 0
        self._stepped_at: float | None = None

    @property
    def is_asking(self) -> bool:
        return self._trial.is_asking

    async def start(self) -> None:
        await self._client.start()

    async def stop(self) -> None:
        await self._client.stop()

    def status(self) -> DraftClientStatus:
        return self._client.status()

    def open(
        self,
        sequence_id: int,
        start: SequenceStart,
        token_ids: Sequence[int],
        *,
        num_wanted: int = DEFAULT_NUM_WANTED,
    ) -> None:
        self._starts[sequence_id] = start
        if self.is_asking:
            self._announced.add(sequence_id)
            self._client.open(sequence_id, start, token_ids, num_wanted=num_wanted)

    def close(self, sequence_id: int) -> None:
        self._starts.pop(sequence_id, None)
        self._withdraw(sequence_id)
        if not self._starts:
            self._stepped_at = None  # what follows is a pause

    def take(self, wants: Sequence[DraftWant], *, wait_seconds: float) -> StepDrafts:
        if not self.is_asking:
            for sequence_id in tuple(self._announced):
                self._withdraw(sequence_id)
            return StepDrafts()
        for want in wants:
            if want.sequence_id not in self._announced and want.sequence_id in self._starts:
                self.open(want.sequence_id, self._starts[want.sequence_id], want.token_ids, num_wanted=want.num_wanted)
        return self._client.take(wants, wait_seconds=wait_seconds)

    def update(self, updates: Sequence[tuple[int, Sequence[int], int]]) -> None:
        self._num_sequences = len(updates)
        self._num_tokens = sum(len(token_ids) for _, token_ids, _ in updates)
        told = [update for update in updates if update[0] in self._announced]
        if told:
            self._client.update(told)

    def observe_step(self, seconds: float) -> None:
        self._client.observe_step(seconds)
        now = self._clock()
        if self._stepped_at is not None and self._num_sequences:
            # From step to step: what the drafter takes between two steps counts as well.
            self._trial.observe(
                num_tokens=self._num_tokens, num_sequences=self._num_sequences, seconds=now - self._stepped_at
            )
        self._num_tokens = self._num_sequences = 0
        self._stepped_at = now if self._starts else None

    def _withdraw(self, sequence_id: int) -> None:
        if sequence_id in self._announced:
            self._announced.discard(sequence_id)
            self._client.close(sequence_id)
