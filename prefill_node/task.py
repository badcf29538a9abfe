"""The state of one prefill job: its sequence, its push, and the times in its answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.low_rank import PackedAdapter
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.engine.scheduler import EngineSequence, PromptScoring, Scheduled, StepPlan
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.connectors import Connector
from outrider.prefill import PrefillFigures, TimedPart
from prefill_node.blend_plan import BlendPlan
from prefill_node.jobs import PrefillJob, PushOutcome
from prefill_node.push import KvPush

MIN_READ_TOKENS = 64
"""Minimum number of held tokens to read from the decode node. Fewer are computed, as reading costs a round trip."""


@dataclass(slots=True, kw_only=True)
class PrefillTask:
    """A job from its arrival to the end of its push. Owned by the engine thread."""

    job: PrefillJob
    sequence: EngineSequence
    push: KvPush | None = None  # None until the push starts
    blend: BlendPlan | None = None  # None: no KV of pieces is reused
    pinned: SequenceKV | None = None  # blocks that the push may still use after the computation has ended
    has_slot: bool = False  # whether the job has a slot, i.e. may be computed and pushed
    is_reading: bool = False  # whether the push is writing the held prefix into the job's blocks
    is_cancelled: bool = False
    num_cached_tokens: int = 0
    num_read_tokens: int = 0
    prompt_logprobs: list[bytes] = field(default_factory=list)  # packed, in pieces
    chunks: list[TimedPart] = field(default_factory=list)  # computed chunks, with times on the monotonic clock
    compute_ended_at: float | None = None

    @classmethod
    def of(cls, job: PrefillJob, adapter: PackedAdapter | None, block_size: int) -> PrefillTask:
        """`adapter`: that of the call's options. `block_size`: of the prefix cache."""
        call = job.call
        blend = BlendPlan.of(call.options.blend, len(call.token_ids), block_size)
        num_top = call.options.prompt_logprobs if call.scored_token_ids else None
        sequence = EngineSequence(
            key=job.job_id,
            token_ids=list(call.token_ids),
            priority=call.options.priority,
            cache_salt=call.options.kv_salt,
            adapter=adapter,
            arrival=job.job_id,
            needs_logits=False,
            num_cacheable=sys.maxsize if blend is None else blend.num_exact,
            scoring=PromptScoring(call.scored_token_ids, num_top=num_top) if num_top is not None else None,
        )
        return cls(job=job, sequence=sequence, blend=blend)

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of tokens that are not computed yet, limited to those for which other requests wait."""
        num_known = self.num_cached_tokens + self.num_read_tokens + self._num_computed_tokens
        return min(len(self.sequence.token_ids) - num_known, self.job.call.max_outstanding_tokens)

    @property
    def _num_computed_tokens(self) -> int:
        return sum(chunk.amount for chunk in self.chunks)

    @property
    def publishable_token_ids(self) -> Sequence[int]:
        """The tokens from the start whose KV may be published: the prefix cache holds only what this node computed."""
        if self.num_read_tokens:
            return ()
        tokens = self.sequence.token_ids
        return tokens if self.blend is None else tokens[: self.blend.num_exact]

    def reserve_to_read(self, pool: BlockPool) -> bool:
        """Reserves blocks for the whole prompt, into which the push can read the held prefix from the decode node.

        Returns False if the job may not read, if reading would gain too little, or if there is no room. A prefix of a
        model with sliding windows is not read, because the decode node has no more than the last window of it.
        """
        call, tokens = self.job.call, self.sequence.token_ids
        if not call.may_read_held or self.sequence.scoring is not None or self.blend is not None or pool.windows:
            return False
        salt = call.options.kv_salt
        kv = SequenceKV.create(pool, tokens, max_cached_tokens=len(tokens), cache_salt=salt, kept_back=0)
        if call.held_prefix_length - kv.num_tokens < MIN_READ_TOKENS or not kv.fits(len(tokens)):
            kv.free()
            return False
        kv.reserve(len(tokens))
        self.sequence.kv, self.is_reading = kv, True
        return True

    def start_push(
        self,
        connector: Connector,
        kv_cache: KVCache,
        *,
        on_ended: Callable[[PushOutcome], None],
        on_read: Callable[[bool], None],
    ) -> KvPush:
        """Starts the push of the prompt, for which all blocks are reserved. Its thread calls the callbacks.

        That of a blended prompt starts before, to tell the decode node of progress (`give_blocks`).
        """
        call, kv = self.job.call, self.sequence.kv
        assert kv is not None or self.blend is not None
        self.push = KvPush(
            connector=connector,
            kv_cache=kv_cache,
            address=call.kv_address,
            spec=TransferSpec(
                transfer_id=call.transfer_id,
                incarnation=call.decode_incarnation,
                start_token=call.held_prefix_length,
                end_token=len(call.token_ids),
                planes=kv_cache.planes,
            ),
            # The ids do not change later: shared blocks come first, and blocks for the rest of the prompt are reserved.
            block_ids=() if kv is None else kv.block_ids,
            windows=() if kv is None else kv.windows,
            on_ended=on_ended,
            read_from=kv.num_tokens if kv is not None and self.is_reading else None,
            on_read=on_read,
        )
        self.push.start()
        return self.push

    def give_blocks(self) -> None:
        """Gives a blended prompt's push the blocks, before anything is offered."""
        if self.blend is not None and self.push is not None and self.sequence.kv is not None:
            self.push.use_blocks(self.sequence.kv.block_ids)

    def note_progress(self) -> None:
        """Tells the decode node that work on a blended prompt goes on, although there is no KV to push yet."""
        if self.push is not None:
            self.push.note_progress()

    def end_reading(self, *, has_read: bool) -> None:
        """Ends reading: the push writes no more blocks. The tokens read are valid only if all arrived (`has_read`)."""
        kv, num_held = self.sequence.kv, self.job.call.held_prefix_length
        assert kv is not None
        self.is_reading = False
        if has_read:
            self.num_read_tokens = num_held - kv.num_tokens
            kv.advance(num_held)

    def pin(self) -> None:
        """Keeps blocks that the push may still use after the sequence has left the batch. Idempotent."""
        kv = self.sequence.kv
        if kv is None or self.push is None or self.pinned is not None:
            return
        if self.is_reading:  # also keeps the blocks without valid tokens, which the push may still write
            self.pinned, self.sequence.kv = kv, None
        else:
            self.pinned = kv.fork()
            self.pinned.release_behind()

    def end_compute(self) -> None:
        """Ends the computation. The push has been offered the whole prompt."""
        assert self.push is not None
        self.compute_ended_at = time.monotonic()
        self.push.finish()

    def result(self, outcome: PushOutcome) -> PrefillFigures:
        """Returns the figures of the answer after a committed push."""
        assert outcome.committed_at is not None
        assert self.compute_ended_at is not None
        first_frame_at = outcome.pushed[0].start_seconds if outcome.pushed else outcome.committed_at
        exposed_from = max(self.compute_ended_at, first_frame_at)
        started_at = self.chunks[0].start_seconds if self.chunks else self.compute_ended_at
        arrived_at = self.job.arrived_at
        return PrefillFigures(
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_read_tokens=self.num_read_tokens,
            num_blended_tokens=0 if self.blend is None else self.blend.num_reused - self.blend.num_recomputed,
            num_recomputed_tokens=0 if self.blend is None else self.blend.num_recomputed,
            compute_seconds=self.compute_ended_at - started_at,
            connector=outcome.connector,
            kv_bytes=outcome.kv_bytes,
            transfer_seconds=outcome.committed_at - first_frame_at,
            exposed_seconds=max(outcome.committed_at - exposed_from, 0.0),
            prompt_logprobs=b"".join(self.prompt_logprobs),
            call_seconds=time.monotonic() - arrived_at,
            chunks=_since(arrived_at, self.chunks),
            pushed=_since(arrived_at, outcome.pushed),
        )


def _since(arrived_at: float, parts: Iterable[TimedPart]) -> tuple[TimedPart, ...]:
    return tuple(
        TimedPart(part.start_seconds - arrived_at, part.end_seconds - arrived_at, part.amount) for part in parts
    )


class Chunk(NamedTuple):
    """A launched forward pass."""

    plan: StepPlan
    launched_at: float  # monotonic seconds
    seconds: float  # duration of the launch, excluding waits for turns
    end: Any  # the cache's fence after the chunk if a device computes asynchronously; None if already computed


def chunk_rows(item: Scheduled, task: PrefillTask | None) -> Iterator[SequenceRows]:
    """Yields the chunk's rows, with logits if prompt logprobs are requested. `task`: None: a piece, see `Blending`.

    Of a blended prompt, each range of consecutive tokens to compute forms rows of its own.
    """
    sequence = item.sequence
    assert sequence.kv is not None
    start, end = sequence.num_computed, sequence.num_computed + item.num_rows
    for run in (range(start, end),) if task is None or task.blend is None else task.blend.runs(start, end):
        yield SequenceRows(
            token_ids=sequence.token_ids[run.start : run.stop],
            start_position=run.start,
            block_ids=sequence.kv.block_table(),
            num_logits=len(item.scored_token_ids),
            adapter=sequence.adapter,
            window_tables=sequence.kv.window_tables(),
            states=sequence.kv.plan_states(len(run)),
        )
