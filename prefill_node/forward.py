"""One forward pass of prompt chunks: the loop's only way into the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.scheduler import Scheduled
from outrider.engine.step_clock import StepClock
from outrider.profile import Part

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.kv_cache.base import KVCache
    from outrider.engine.model_runner import ModelRunner


class Forward(Protocol):
    """Computes KV of rows into the cache."""

    def __call__(
        self,
        block_copies: Sequence[tuple[int, int]],
        rows: Sequence[SequenceRows],
        *,
        on_layer_done: Callable[[int], None],
    ) -> Tensor:
        """`on_layer_done(layer)` follows each layer, rising, once its keys and values are in the cache.

        Returns logits of the rows that need them, in order.  # [num_logits, vocab_size] float32
        """


class PagedForward:
    """A `Forward` over a model runner."""

    def __init__(self, kv_cache: KVCache, runner: ModelRunner, clock: StepClock) -> None:
        self._kv_cache = kv_cache
        self._runner = runner
        self._time = clock

    def __call__(
        self,
        block_copies: Sequence[tuple[int, int]],
        rows: Sequence[SequenceRows],
        *,
        on_layer_done: Callable[[int], None],
    ) -> Tensor:
        self._kv_cache.copy_blocks(block_copies)
        batch = build_input_batch(rows, self._kv_cache.block_size)
        self._time.mark(Part.BATCH)
        logits = self._runner.forward(batch, on_layer_done=on_layer_done)
        self._time.mark(Part.FORWARD)
        return logits


def chunk_rows(item: Scheduled) -> SequenceRows:
    """With logits where logprobs of the prompt are wanted."""
    sequence = item.sequence
    assert sequence.kv is not None
    start = sequence.num_computed
    return SequenceRows(
        token_ids=sequence.token_ids[start : start + item.num_rows],
        start_position=start,
        block_ids=sequence.kv.block_table(),
        num_logits=len(item.scored_token_ids),
    )
