"""What an attention backend is: rows of many sequences against their paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from outrider.engine.input_batch import InputBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer wants beyond plain causal attention."""

    scaling: float  # multiplies query · key
    sliding_window: int | None = None  # keys at positions (p - sliding_window, p] of a row at position p
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


class AttentionBackend(Protocol):
    """Paged, ragged, causal attention with grouped query heads, over blocks of any size.

    A row at position p of a sequence sees that sequence's keys at positions 0 … p (or
    the last `sliding_window` of them), wherever their blocks lie. A row in a tree of drafts
    sees the known tokens and its own path, in the order of positions: from the batch's
    `path_slots`, not from the block table. Not thread-safe: a backend owns workspaces and
    belongs to one model runner. Backends inherit the defaults here.
    """

    name: str  # as in settings, such as "torch_sdpa"
    can_be_captured: bool = False
    """Whether what it launches for a padded batch follows from the batch's bucket alone (see `step_graphs`)."""

    def plan(self, batch: InputBatch) -> InputBatch:
        """Returns the batch with an `attention_plan`, or as it is where there is nothing to plan.

        A plan is made on the host. It goes to the device with the other fields, and is as long for every padded batch
        of a bucket.
        """
        return batch

    def prepare(self, batch: InputBatch) -> Any:
        """Returns what all layers of one forward share (indices, masks); it is passed to `attend` as `plan`.

        It plans a batch that nobody has planned. `InputBatch.on` of the unplanned one is then a transfer of its own.
        """

    def store(self, keys: Tensor, values: Tensor, key_cache: Any, value_cache: Any, slots: Tensor) -> None:
        """Writes rows [num_rows, num_kv_heads, head_dim] to slots [num_rows] int64 of a layer's caches."""
        key_cache.flatten(0, 1).index_copy_(0, slots, keys)
        value_cache.flatten(0, 1).index_copy_(0, slots, values)

    def attend(
        self,
        plan: Any,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key_cache: Any,  # this layer's of PagedKVCache.keys, this forward's rows included
        value_cache: Any,  # same, of PagedKVCache.values
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim] in the query's dtype."""
