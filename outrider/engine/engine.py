"""The components that the prefill and decode loops need for forward passes, as one value."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.low_rank import PackedAdapter
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_clock import StepClock
from outrider.profile import Part
from outrider.request import Adapter

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.ranks.sharded_cache import KVCache
    from outrider.engine.runner_base import ModelRunner
    from outrider.engine.sampler import Sampler


@dataclass(frozen=True, slots=True)
class PromptEngine:
    """Block pool, scheduler, KV cache and runner of one model. Only one thread, its owner, may use it."""

    pool: BlockPool
    scheduler: Scheduler
    kv_cache: KVCache
    runner: ModelRunner
    clock: StepClock = field(default_factory=StepClock, kw_only=True)
    find_adapter: Callable[[Adapter], PackedAdapter | None] = field(default=lambda _: None, kw_only=True)
    """Returns an adapter that sequences may have, or None if it is not loaded."""

    def forward(
        self,
        block_copies: Sequence[tuple[int, int]],
        rows: Sequence[SequenceRows],
        *,
        on_layer_done: Callable[[int], None] | None = None,
    ) -> Array:
        """Copies the shared blocks that the step writes to, then runs one forward pass.

        If there is main memory for evicted blocks, it is told what computing prompts takes, unless only a device knows.
        `on_layer_done(layer)` is called for each layer in order, once its keys and values are in the cache.

        Returns:
            The logits of the rows that need them, in order, as described in ModelRunner.forward.
        """
        if block_copies:
            self.kv_cache.copy_blocks(block_copies)
        batch = build_input_batch(rows, self.pool.block_size)
        self.clock.mark(Part.BATCH)
        before = self.clock.spent(Part.FORWARD)
        logits = self.runner.forward(batch, on_layer_done=on_layer_done)
        self.clock.mark(Part.FORWARD)
        if self.pool.host is not None and not self.runner.is_asynchronous:
            num_prompt_rows = sum([len(each.token_ids) for each in rows if each.num_logits < len(each.token_ids)])
            seconds = (self.clock.spent(Part.FORWARD) - before) / 1e9  # without the callbacks' hand-offs and turns
            self.pool.host.price.add_step(seconds, num_rows=batch.num_rows, num_prompt_rows=num_prompt_rows)
        return logits

    def prepare_ahead(self, rows: Sequence[SequenceRows]) -> InputBatch:
        """Prepares the batch of a future forward pass, one row per sequence, before its token ids are known."""
        return self.runner.prepare_ahead(build_input_batch(rows, self.pool.block_size))

    def run(self, batch: InputBatch, token_ids: Sequence[int]) -> Array:
        """Runs a batch from `prepare_ahead` with these token ids, one per row. Returns the same as `forward`."""
        batch.arrays.token_ids[: len(token_ids)] = array("q", token_ids)
        self.clock.mark(Part.BATCH)
        logits = self.runner.forward(batch)[: len(token_ids)]
        self.clock.mark(Part.FORWARD)
        return logits


@dataclass(frozen=True, slots=True)
class Engine(PromptEngine):
    """A PromptEngine with a sampler, which decides tokens."""

    sampler: Sampler
