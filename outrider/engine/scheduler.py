"""Continuous batching over one block pool: decides which sequences run in a step, with how many rows. Torch-free."""

from __future__ import annotations

import operator
import sys
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.low_rank import PackedAdapter
from outrider.prefill import MAX_SCORED_ROWS
from outrider.request import TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptScoring:
    """A request for logprobs of a prompt's tokens. The prompt's rows are computed, not taken from the prefix cache, and
    have logits.
    """

    token_ids: Sequence[int]  # the prompt's tokens without the first: entry i follows row i
    num_top: int  # number of alternatives per token, 0 to 20
    num_done: int = 0  # number of logprobs computed so far, from the first entry on


@dataclass(slots=True, eq=False)
class EngineSequence:
    """The engine's state of one sequence. It is mutable, owned by the node's loop, and compared by identity.

    The loop appends committed tokens to `token_ids` and updates `kv`'s valid tokens; the scheduler sets and frees `kv`.
    """

    key: int  # unique among the sequences of a scheduler
    token_ids: list[int]  # prompt and committed tokens, from position 0
    kv: SequenceKV | None = None  # None: the sequence waits, and none of its KV is computed
    priority: int = 0  # higher runs first
    arrival: int = 0  # lower is older; ties are broken by key
    needs_logits: bool = True  # whether the last known token is always fed, even if it is in the prefix cache
    cache_salt: bytes = b""  # only sequences with the same salt share cached KV; see RequestOptions.kv_salt
    adapter: PackedAdapter | None = None  # None: the model itself
    num_cacheable: int = sys.maxsize  # maximum number of tokens that may come from the prefix cache
    num_preemptions: int = 0
    scoring: PromptScoring | None = None  # None: no scoring is requested, or it is complete

    @property
    def num_computed(self) -> int:
        """The number of tokens whose KV is computed."""
        return 0 if self.kv is None else self.kv.num_tokens

    @property
    def num_uncomputed(self) -> int:
        """The number of known tokens without KV, whose rows must still be fed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_cached_tokens(self) -> int:
        """The number of computed tokens that came from the prefix cache at the start."""
        return 0 if self.kv is None else self.kv.num_cached_tokens

    def score(self, start: int, logprobs: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Records the logprobs of the tokens that follow the rows from `start` on. Returns those that are new."""
        scoring = self.scoring
        assert scoring is not None
        new = logprobs[max(scoring.num_done - start, 0) :]  # after a preemption, some are computed again
        scoring.num_done += len(new)
        if scoring.num_done == len(scoring.token_ids):
            self.scoring = None
        return new


class Scheduled(NamedTuple):
    """One sequence's share of a step: its rows are token_ids[num_computed :][:num_rows], then the drafts."""

    sequence: EngineSequence
    num_rows: int  # number of known tokens that are fed, at least 1
    num_draft_tokens: int  # number of draft rows granted after them; 0 unless num_rows is 1
    reaches_end: bool  # whether this step computes all known tokens, so that its last row decides the next one
    scored_token_ids: Sequence[int] = ()  # if logprobs are requested, the token after each row; otherwise empty


@dataclass(slots=True)
class StepReservation:
    """The result of `reserve`: the sequences of the step, which have blocks for all known tokens, and the number of
    rows left for drafts.
    """

    sequences: Sequence[EngineSequence] = ()  # sequences with one token to feed; each may verify drafts
    prompts: Sequence[EngineSequence] = ()  # sequences with more tokens to feed
    max_draft_rows: int = 0
    num_rows: int = 0  # number of rows of the step, including prompts but not drafts
    admitted: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)
    copies: dict[EngineSequence, list[tuple[int, int]]] = field(default_factory=dict)
    stalled: set[EngineSequence] = field(default_factory=set)  # running sequences without blocks for this step


class StepPlan(NamedTuple):
    """The work of one step. All its blocks are reserved. Copy `block_copies` before the forward pass.

    A block may be the source of one pair and the destination of a later pair, so read all sources first or copy in
    order.
    """

    scheduled: tuple[Scheduled, ...] = ()  # first sequences with one row, then prompt chunks, then scored prompts
    admitted: tuple[EngineSequence, ...] = ()  # moved from waiting to running; some may have nothing to compute
    preempted: tuple[EngineSequence, ...] = ()  # moved from running to waiting; their KV is freed
    block_copies: tuple[tuple[int, int], ...] = ()  # (source, destination) block ids

    @property
    def num_rows(self) -> int:
        """Rows in the forward pass."""
        return sum([item.num_rows + item.num_draft_tokens for item in self.scheduled])


class Scheduler:
    """Continuous batching with chunked prefill, draft rows, and preemption by recomputation or from main memory.

    Running sequences get their blocks first; then waiting ones are admitted while blocks last. Rows are assigned in
    this order: one for each sequence that has only its newest token to feed (`reserve`), then drafts, as the caller
    chooses, then prompt chunks (`assign_rows`). Prompt chunks may take at least half of the rows that remain for drafts
    and chunks, so neither starves.

    If blocks are short, they are taken in this order: from drafts and blocks reserved ahead, from what the caller can
    reclaim, and from whole sequences, which are preempted: the lowest priority first, then the latest arrival, but
    never the oldest running one. A preempted sequence waits ahead of all others of its priority.

    Not thread-safe. The cost of a step does not grow with a sequence's length, except once at its admission. Sources:
    Orca (iteration-level batching), Sarathi-Serve (chunked prefill together with decodes) and vLLM v1's scheduler.
    """

    def __init__(
        self, pool: BlockPool, *, max_running: int, max_rows_per_step: int, reserve_blocks_per_running: int = 1
    ) -> None:
        assert min(max_running, max_rows_per_step) >= 1
        self._pool = pool
        self._max_running = max_running
        self.max_rows_per_step = max_rows_per_step
        self._reserve_blocks = reserve_blocks_per_running
        self._running: list[EngineSequence] = []  # sorted by _running_rank
        self._waiting: list[EngineSequence] = []  # sorted by _waiting_rank
        self._first_row = 0  # index where the round-robin assignment of single rows begins
        self._refused: tuple[EngineSequence, tuple[int, ...]] | None = None  # queue's head, free blocks, -num_running

    @property
    def running(self) -> Sequence[EngineSequence]:
        """The sequences that hold KV, by priority, then age."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: EngineSequence) -> None:
        """Queues a sequence for admission, by priority, then age. It may hold KV. It must fit the empty pool."""
        assert sequence.token_ids
        assert self._fits_an_empty_pool(sequence)
        insort(self._waiting, sequence, key=_waiting_rank)

    def add_running(self, sequence: EngineSequence) -> None:
        """Adds a sequence that already has KV to the running ones, without admission. The caller checks max_running."""
        assert sequence.kv is not None
        assert self._fits_an_empty_pool(sequence)
        insort(self._running, sequence, key=_running_rank)

    def remove(self, sequence: EngineSequence) -> None:
        """Removes a finished or aborted sequence, running or waiting, and frees its KV. Idempotent."""
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._pool.forget_preempted(sequence.key)
        if sequence.kv is not None:
            sequence.kv.free()
            sequence.kv = None

    def plan(self) -> StepPlan:
        """Plans a step without drafts."""
        return self.assign_rows(self.reserve(), {})

    def reserve(self, *, reclaim: Callable[[EngineSequence], bool] = lambda _sequence: False) -> StepReservation:
        """Plans the first half of a step: reserves blocks for known tokens, preempts and admits, and assigns rows.

        `reclaim(sequence)` frees blocks of work that is outside the scheduler and ranks below the sequence; it returns
        False if it found none. The result is empty if no sequence runs, or if only outside work holds needed blocks.
        """
        room = StepReservation()
        for sequence in tuple(self._running):
            kv = sequence.kv
            if kv is not None and not kv.has_reserved(len(sequence.token_ids)):  # None: just preempted
                self._reserve_known(sequence, room, reclaim)
        if not room.preempted and not room.stalled:
            self._admit(room)
        self._divide_rows(room)
        return room

    def assign_rows(self, room: StepReservation, num_drafts: Mapping[int, int]) -> StepPlan:
        """Plans a step's second half. `num_drafts`: draft tokens by sequence key, at most `room.max_draft_rows` in all.

        A sequence that lacks blocks for its drafts verifies fewer. Do not use `room` again.
        """
        assert sum(num_drafts.values()) <= room.max_draft_rows
        budget = self.max_rows_per_step - len(room.sequences)
        scheduled: list[Scheduled] = []
        for sequence in room.sequences:
            num_granted = num_drafts.get(sequence.key, 0)
            if num_granted:
                num_granted = self._grant_drafts(sequence, num_granted)
                budget -= num_granted
            scheduled.append(Scheduled(sequence, 1, num_granted, True))
        scored: list[Scheduled] = []
        num_scored_rows = MAX_SCORED_ROWS
        for sequence in room.prompts:
            num_uncomputed = sequence.num_uncomputed
            num_rows = min(num_uncomputed, budget)
            if num_rows == 0:
                break
            token_ids: Sequence[int] = ()
            if sequence.scoring is not None:
                start = sequence.num_computed
                token_ids = sequence.scoring.token_ids[start : start + min(num_rows, num_scored_rows)]
                num_rows = len(token_ids)
                num_scored_rows -= num_rows
                if num_rows == 0:
                    continue  # other prompts have used all scored rows of this step
            budget -= num_rows
            (scored if token_ids else scheduled).append(
                Scheduled(sequence, num_rows, 0, num_rows == num_uncomputed, token_ids)
            )
        return StepPlan(
            scheduled=(*scheduled, *scored),
            admitted=tuple(room.admitted),
            preempted=tuple(room.preempted),
            block_copies=tuple(pair for pairs in room.copies.values() for pair in pairs),
        )

    # --- blocks ---------------------------------------------------------------------------

    def _reserve_known(
        self, sequence: EngineSequence, room: StepReservation, reclaim: Callable[[EngineSequence], bool]
    ) -> None:
        """Reserves blocks for a sequence's known tokens, by preemption if needed. At worst preempts or skips it."""
        assert sequence.kv is not None
        while True:
            try:
                copies = sequence.kv.reserve(len(sequence.token_ids))
            except NoFreeBlocksError:
                if self._release_slack():
                    continue
                victim = self._victim(sequence.kv)
                if reclaim(victim or sequence):
                    continue
                if victim is None:
                    room.stalled.add(sequence)
                    return
                self._preempt(victim, room)
                if victim is sequence:
                    return
            else:
                if copies:
                    room.copies[sequence] = copies
                return

    def _fits_an_empty_pool(self, sequence: EngineSequence) -> bool:
        return self._pool.num_blocks_for(len(sequence.token_ids)) <= self._pool.num_blocks_together

    def _release_slack(self) -> bool:
        """Releases blocks reserved past the known tokens, e.g. for drafts. Returns False if there were none."""
        before = self._pool.free_by_group
        for sequence in self._running:
            assert sequence.kv is not None
            sequence.kv.release_beyond(len(sequence.token_ids))
        return self._pool.free_by_group != before

    def _victim(self, kv: SequenceKV) -> EngineSequence | None:
        """Returns the sequence to preempt for `kv`, never the oldest one, so that progress is guaranteed."""
        oldest = min(self._running, key=lambda sequence: (sequence.arrival, sequence.key))
        return next((each for each in reversed(self._running) if each is not oldest and kv.shares_pool(each.kv)), None)

    def _preempt(self, sequence: EngineSequence, room: StepReservation) -> None:
        assert sequence.kv is not None
        sequence.kv.preempt(sequence.key, sequence.token_ids)
        sequence.kv = None
        sequence.num_preemptions += 1
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=_waiting_rank)
        room.copies.pop(sequence, None)
        room.stalled.discard(sequence)
        room.preempted.append(sequence)

    def _admit(self, room: StepReservation) -> None:
        """Admits waiting sequences strictly in order, each with blocks for all its known tokens.

        A prompt that would get no rows in this step keeps waiting, so that it can reuse blocks published meanwhile.
        """
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            available = (*self._pool.free_by_group, -len(self._running))
            refused, then = self._refused or (None, ())
            was_refused = refused is sequence and all(map(operator.le, available, then))
            if self._running and (was_refused or not self._has_rows_for(sequence)):
                return  # trying again would hash the whole prompt for the same result
            kv = sequence.kv = sequence.kv or self._cached_prefix(sequence)
            num_growing = sum(kv.shares_pool(other.kv) for other in self._running)
            if not kv.fits(len(sequence.token_ids), kept_back=self._reserve_blocks * num_growing):
                self._refused = (sequence, available)
                if kv.num_tokens == kv.num_cached_tokens:  # next time, another rank may have room
                    kv.free()
                    sequence.kv = None
                return
            self._refused = None
            self._pool.forget_preempted(sequence.key)
            copies = kv.reserve(len(sequence.token_ids))
            if copies:
                room.copies[sequence] = copies
            del self._waiting[0]
            insort(self._running, sequence, key=_running_rank)
            room.admitted.append(sequence)

    def _has_rows_for(self, sequence: EngineSequence) -> bool:
        """Returns whether running prompts of higher rank leave rows to this sequence, or it needs just one row."""
        if sequence.num_uncomputed == 1:
            return True
        rank = _running_rank(sequence)
        ahead = [other for other in self._running if other.num_uncomputed > 1 and _running_rank(other) < rank]
        return _num_prompt_rows(ahead) < self.max_rows_per_step

    def _cached_prefix(self, sequence: EngineSequence) -> SequenceKV:
        limit = sequence.num_cacheable if sequence.scoring is None else sequence.scoring.num_done
        token_ids, salt = sequence.token_ids, sequence.cache_salt
        end = min(len(token_ids) - sequence.needs_logits, limit)
        kept_back = self._reserve_blocks * len(self._running)
        return SequenceKV.create(self._pool, token_ids, max_cached_tokens=end, cache_salt=salt, kept_back=kept_back)

    # --- rows -----------------------------------------------------------------------------

    def _divide_rows(self, room: StepReservation) -> None:
        """Assigns a row to each sequence that needs only one, and divides the rest between drafts and prompts."""
        singles: list[EngineSequence] = []
        prompts: list[EngineSequence] = []
        stalled = room.stalled
        for sequence in self._running:
            kv = sequence.kv
            assert kv is not None
            num_uncomputed = len(sequence.token_ids) - kv.num_tokens
            if num_uncomputed == 0 or (stalled and sequence in stalled):
                continue
            if num_uncomputed == 1 and sequence.scoring is None:
                singles.append(sequence)
                continue
            prompts.append(sequence)
        num_prompt_rows = _num_prompt_rows(prompts)
        if len(singles) + bool(prompts) > self.max_rows_per_step:
            singles = self._in_turn(singles, num_rows=self.max_rows_per_step - bool(prompts))
        budget = self.max_rows_per_step - len(singles)
        room.sequences, room.prompts = singles, prompts
        room.max_draft_rows = budget - min(num_prompt_rows, (budget + 1) // 2) if singles else 0
        room.num_rows = len(singles) + min(num_prompt_rows, budget)

    def _in_turn(self, singles: list[EngineSequence], *, num_rows: int) -> list[EngineSequence]:
        """Selects `num_rows` sequences in round-robin order, beginning after the previous step's last sequence."""
        first = self._first_row % len(singles)
        self._first_row = first + num_rows
        return (singles[first:] + singles[:first])[:num_rows]

    def _grant_drafts(self, sequence: EngineSequence, num_drafts: int) -> int:
        """Reserves slots for as many of the drafts as free blocks allow, and returns their number. Never preempts."""
        assert sequence.kv is not None
        num_known = len(sequence.token_ids)
        if sequence.kv.has_reserved(num_known + num_drafts):
            return num_drafts
        num_granted = max(sequence.kv.max_reserved(num_known + num_drafts) - num_known, 0)
        if num_granted > 0:
            copies = sequence.kv.reserve(num_known + num_granted)
            assert not copies  # if a block was shared, reserving the known tokens has already copied it
        return num_granted


def _num_prompt_rows(prompts: Sequence[EngineSequence]) -> int:
    """Returns the number of rows that these prompts would get in a step if only scored rows were limited."""
    num_scored = sum(prompt.num_uncomputed for prompt in prompts if prompt.scoring is not None)
    return sum(prompt.num_uncomputed for prompt in prompts if prompt.scoring is None) + min(num_scored, MAX_SCORED_ROWS)


def _running_rank(sequence: EngineSequence) -> tuple[int, int, int]:
    return -sequence.priority, sequence.arrival, sequence.key


def _waiting_rank(sequence: EngineSequence) -> tuple[int, bool, int, int]:
    return -sequence.priority, sequence.num_preemptions == 0, sequence.arrival, sequence.key
