"""Who runs in a step, and with how many rows: continuous batching over one block pool. Torch-free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.prefill import MAX_SCORED_ROWS
from outrider.request import TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptScoring:
    """Logprobs of a prompt's tokens that are wanted: its rows are computed, and give logits."""

    token_ids: Sequence[int]  # the prompt's without its first: entry i follows row i
    num_top: int  # alternatives, 0 to 20
    num_done: int = 0  # logprobs that there are: of the first entries


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One sequence as the engine sees it. Mutable; owned by the node's loop, compared by identity.

    The loop appends committed tokens to `token_ids` and tells `kv` what became valid; the
    scheduler sets and frees `kv`.
    """

    key: int  # unique among the sequences of a scheduler
    token_ids: list[int]  # prompt and committed tokens, from position 0
    kv: SequenceKV | None = None  # None: waiting, nothing computed
    priority: int = 0  # higher runs first
    arrival: int = 0  # lower is older; equal arrivals count by key
    needs_logits: bool = True  # then the last known token is always fed, even if the prefix cache holds it
    cache_salt: bytes = b""  # only sequences of the same salt share cached KV
    num_preemptions: int = 0
    scoring: PromptScoring | None = None  # None: nothing is wanted, or all of it is done

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is there."""
        return 0 if self.kv is None else self.kv.num_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: rows that are still to be fed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_cached_tokens(self) -> int:
        """Of those computed, what the prefix cache gave at the start."""
        return 0 if self.kv is None else self.kv.num_cached_tokens

    def score(self, start: int, logprobs: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Takes the logprobs of what follows the rows from `start` on. Returns those that are new."""
        scoring = self.scoring
        assert scoring is not None
        new = logprobs[max(scoring.num_done - start, 0) :]  # it may have been preempted since
        scoring.num_done += len(new)
        if scoring.num_done == len(scoring.token_ids):
            self.scoring = None
        return new


class Scheduled(NamedTuple):
    """One sequence's share of a step: its rows are token_ids[num_computed :][:num_rows], then the drafts."""

    sequence: EngineSequence
    num_rows: int  # known tokens fed, >= 1
    num_draft_tokens: int  # rows granted to drafts after them; 0 unless num_rows is 1
    reaches_end: bool  # every known token is computed after this step: its last row decides the next one
    scored_token_ids: Sequence[int] = ()  # empty, or of each row what follows it: its logprob is wanted


@dataclass(slots=True)
class StepRoom:
    """What `reserve` has found: who runs in the step, with blocks for all known tokens, and the rows for drafts."""

    sequences: Sequence[EngineSequence] = ()  # that have only their newest token to feed: a row each; may verify drafts
    prompts: Sequence[EngineSequence] = ()  # that have more to feed
    max_draft_rows: int = 0
    num_rows: int = 0  # of the step without drafts, prompts included
    admitted: list[EngineSequence] = field(default_factory=list)
    preempted: list[EngineSequence] = field(default_factory=list)
    copies: dict[EngineSequence, list[tuple[int, int]]] = field(default_factory=dict)
    stalled: set[EngineSequence] = field(default_factory=set)  # running, but without blocks for this step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. Blocks for all of it are reserved; `block_copies` come before the forward.

    A block may be the source of one pair and the destination of a later one: read all
    sources first, or copy in order.
    """

    scheduled: tuple[Scheduled, ...] = ()  # sequences with one row first, prompt chunks after them, scored ones last
    admitted: tuple[EngineSequence, ...] = ()  # left `waiting` for `running`; possibly with nothing to compute
    preempted: tuple[EngineSequence, ...] = ()  # left `running` for `waiting`; their KV is gone
    block_copies: tuple[tuple[int, int], ...] = ()  # (source, destination) block ids

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass."""
        return sum(item.num_rows + item.num_draft_tokens for item in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill, draft rows and preemption by recomputation.

    Running sequences get their blocks first, then waiting ones join while blocks last.
    Rows are given out in this order: one for each sequence that has only its newest token
    to feed (`reserve`), then drafts, as the caller chooses, then prompt chunks (`hand_out`); drafts leave chunks at
    least half of what remains, so neither side starves. When blocks are short, drafts go first, then room
    reserved ahead, then what the caller can reclaim, then whole sequences: lowest priority,
    then latest arrival, never the oldest running one. A preempted sequence waits ahead of all
    others of its priority.

    Not thread-safe. Nothing in a step grows with the length of a sequence, except once
    when it is admitted. After Orca (iteration-level batching), Sarathi-Serve (chunked
    prefill beside decodes) and vLLM v1's scheduler.
    """

    def __init__(
        self, pool: BlockPool, *, max_running: int, max_rows_per_step: int, reserve_blocks_per_running: int = 1
    ) -> None:
        assert max_running >= 1
        assert max_rows_per_step >= 1
        self._pool = pool
        self._max_running = max_running
        self.max_rows_per_step = max_rows_per_step
        self._reserve_blocks = reserve_blocks_per_running
        self._running: list[EngineSequence] = []  # by _running_rank
        self._waiting: list[EngineSequence] = []  # by _waiting_rank
        self._first_row = 0  # where handing out single rows begins when there are more than the budget
        self._refused: tuple[EngineSequence, int] | None = None  # head of waiting, blocks there were

    @property
    def running(self) -> Sequence[EngineSequence]:
        """Sequences that hold KV, by priority, then age."""
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
        """Waits for admission, by priority, then age. It may bring KV that it holds already; it must fit the pool."""
        assert sequence.token_ids
        assert self._fits_an_empty_pool(sequence)
        insort(self._waiting, sequence, key=_waiting_rank)

    def add_running(self, sequence: EngineSequence) -> None:
        """Joins the running batch at once, with the KV that it brings; max_running is the caller's check here."""
        assert sequence.kv is not None
        assert self._fits_an_empty_pool(sequence)
        insort(self._running, sequence, key=_running_rank)

    def remove(self, sequence: EngineSequence) -> None:
        """Takes a finished or aborted sequence out, wherever it is, and frees its KV. Idempotent."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.kv is not None:
            sequence.kv.free()
            sequence.kv = None

    def plan(self) -> StepPlan:
        """A step without drafts."""
        return self.hand_out(self.reserve(), {})

    def reserve(self, *, reclaim: Callable[[EngineSequence], bool] = lambda _sequence: False) -> StepRoom:
        """The first half of a step: blocks for known tokens, preempting and admitting as it must, and who gets rows.

        `reclaim(sequence)` frees blocks that are held outside the scheduler for something that ranks behind this
        sequence; False: there are none. There is no room when nothing runs, or when others than this scheduler hold
        the blocks that are needed.
        """
        room = StepRoom()
        for sequence in tuple(self._running):
            kv = sequence.kv
            if kv is not None and not kv.has_reserved(len(sequence.token_ids)):  # None: preempted for one before it
                self._reserve_known(sequence, room, reclaim)
        if not room.preempted and not room.stalled:
            self._admit(room)
        self._divide_rows(room)
        return room

    def hand_out(self, room: StepRoom, num_drafts: Mapping[int, int]) -> StepPlan:
        """The second half. `num_drafts`: draft tokens by sequence key, in all at most `room.max_draft_rows`.

        Those whose blocks do not suffice verify fewer. The room is used up.
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
                    continue  # others have taken this step's
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
        self, sequence: EngineSequence, room: StepRoom, reclaim: Callable[[EngineSequence], bool]
    ) -> None:
        """Blocks for all known tokens of a running sequence, or it is preempted, or it sits this step out."""
        assert sequence.kv is not None
        while True:
            try:
                copies = sequence.kv.reserve(len(sequence.token_ids))
            except NoFreeBlocksError:
                if self._release_slack():
                    continue
                victim = self._victim()
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
        return self._pool.num_blocks_for(len(sequence.token_ids)) <= self._pool.num_blocks

    def _release_slack(self) -> bool:
        """Blocks held past the known tokens (for drafts, or ahead of need) go back. False: there were none."""
        before = self._pool.num_free_blocks
        for sequence in self._running:
            assert sequence.kv is not None
            sequence.kv.release_beyond(len(sequence.token_ids))
        return self._pool.num_free_blocks > before

    def _victim(self) -> EngineSequence | None:
        """The running sequence to preempt next; the oldest one always stays, so that something always ends."""
        oldest = min(self._running, key=lambda sequence: (sequence.arrival, sequence.key))
        return next((sequence for sequence in reversed(self._running) if sequence is not oldest), None)

    def _preempt(self, sequence: EngineSequence, room: StepRoom) -> None:
        assert sequence.kv is not None
        sequence.kv.publish(sequence.token_ids)  # so that what is not evicted meanwhile need not be recomputed
        sequence.kv.free()
        sequence.kv = None
        sequence.num_preemptions += 1
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=_waiting_rank)
        room.copies.pop(sequence, None)
        room.stalled.discard(sequence)
        room.preempted.append(sequence)

    def _admit(self, room: StepRoom) -> None:
        """Waiting sequences join in order, each with blocks for all its known tokens; none overtakes the head.

        A prompt that gets no rows in this step waits: what others publish meanwhile it need not compute.
        """
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            kept_back = self._reserve_blocks * len(self._running)  # growth of those that run
            available = self._pool.num_free_blocks - kept_back
            was_refused = self._refused is not None and self._refused[0] is sequence and available <= self._refused[1]
            if self._running and (was_refused or not self._has_rows_for(sequence)):
                return  # asking again would hash the whole prompt for the same answer
            kv = sequence.kv or self._cached_prefix(sequence)
            if kv.num_blocks_needed(len(sequence.token_ids)) + kept_back > self._pool.num_free_blocks:
                self._refused = (sequence, available)
                if kv is not sequence.kv:
                    kv.free()
                return
            self._refused = None
            sequence.kv = kv
            copies = kv.reserve(len(sequence.token_ids))
            if copies:
                room.copies[sequence] = copies
            del self._waiting[0]
            insort(self._running, sequence, key=_running_rank)
            room.admitted.append(sequence)

    def _has_rows_for(self, sequence: EngineSequence) -> bool:
        """Whether running prompts that rank ahead leave it rows of a step; decodes take turns."""
        if sequence.num_uncomputed == 1:
            return True
        rank = _running_rank(sequence)
        ahead = [other for other in self._running if other.num_uncomputed > 1 and _running_rank(other) < rank]
        return _num_prompt_rows(ahead) < self.max_rows_per_step

    def _cached_prefix(self, sequence: EngineSequence) -> SequenceKV:
        num_tokens = len(sequence.token_ids)
        max_cached_tokens = num_tokens - 1 if sequence.needs_logits else num_tokens
        if sequence.scoring is not None:
            max_cached_tokens = min(max_cached_tokens, sequence.scoring.num_done)
        return SequenceKV.create(
            self._pool, sequence.token_ids, max_cached_tokens=max_cached_tokens, cache_salt=sequence.cache_salt
        )

    # --- rows -----------------------------------------------------------------------------

    def _divide_rows(self, room: StepRoom) -> None:
        """A row for each sequence that needs one only, and what that leaves for drafts and prompts."""
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
        """More sequences than rows: each step goes on where the last one ended."""
        first = self._first_row % len(singles)
        self._first_row = first + num_rows
        return (singles[first:] + singles[:first])[:num_rows]

    def _grant_drafts(self, sequence: EngineSequence, num_drafts: int) -> int:
        """As many draft slots as blocks allow, up to `num_drafts`. Never preempts."""
        assert sequence.kv is not None
        num_known = len(sequence.token_ids)
        if sequence.kv.has_reserved(num_known + num_drafts):
            return num_drafts
        spare = sequence.kv.capacity - num_known
        num_granted = min(num_drafts, spare + self._pool.num_free_blocks * self._pool.block_size)
        if num_granted > 0:
            copies = sequence.kv.reserve(num_known + num_granted)
            assert not copies  # made with the blocks of the known tokens
        return num_granted


def _num_prompt_rows(prompts: Sequence[EngineSequence]) -> int:
    """Rows that a step without a limit would give to these."""
    num_scored = sum(prompt.num_uncomputed for prompt in prompts if prompt.scoring is not None)
    return sum(prompt.num_uncomputed for prompt in prompts if prompt.scoring is None) + min(num_scored, MAX_SCORED_ROWS)


def _running_rank(sequence: EngineSequence) -> tuple[int, int, int]:
    return -sequence.priority, sequence.arrival, sequence.key


def _waiting_rank(sequence: EngineSequence) -> tuple[int, bool, int, int]:
    return -sequence.priority, sequence.num_preemptions == 0, sequence.arrival, sequence.key
