"""The interface of attention backends: rows of many sequences attend over their paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from outrider.engine.input_batch import InputBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)  # a comparison of tensors would not be a bool
class AttentionOptions:
    """A layer's options beyond plain causal attention."""

    scaling: float  # multiplies query · key
    sliding_window: int | None = None  # a row at position p sees keys at (p - sliding_window, p]; None: all up to p
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [num_heads] float32: the score of one more key of each head, which has no value
    latent_dim: int = 0  # above 0: latent attention. Keys and values are stored as `stored_vectors` says


class AttentionBackend(Protocol):
    """Paged, ragged, causal attention with grouped query heads, over blocks of any size.

    A row at position p of a sequence sees that sequence's keys at positions 0 … p (or the last `sliding_window` of
    them), wherever their blocks are. A row in a draft tree sees the known tokens and the drafts on its own path, in the
    order of positions; the slots of its path come from the batch's `path_slots`, not from the block table. Not
    thread-safe: a backend owns workspaces and belongs to one model runner. Implementations inherit the defaults here.
    """

    name: str  # as in settings, such as "torch_sdpa"
    can_be_captured: bool = False
    """Whether the kernel launches for a padded batch depend only on the batch's bucket, as CUDA graphs require."""

    def plan(self, batch: InputBatch) -> InputBatch:
        """Returns the batch with an `attention_plan`, or unchanged if there is nothing to plan.

        A plan is made on the host and uploaded with the other fields. The plans of all padded batches of a bucket have
        the same length.
        """
        return batch

    def prepare(self, batch: InputBatch, group: int = 0) -> Any:
        """Returns what all layers of a group share in one forward (indices, masks), which `attend` takes as `plan`.

        A batch without a plan is planned first. That makes a copy of the batch, whose fields are uploaded separately.
        """

    def store(self, keys: Tensor, values: Tensor, key_cache: Any, value_cache: Any, slots: Tensor) -> None:
        """Writes rows [num_rows, num_kv_heads, width of the cache] to slots [num_rows] int64 of a layer's caches."""
        key_cache.flatten(0, 1).index_copy_(0, slots, keys)
        value_cache.flatten(0, 1).index_copy_(0, slots, values)

    def attend(
        self,
        plan: Any,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key_cache: Any,  # this layer's entry of PagedKVCache.keys, which already has this forward's rows
        value_cache: Any,  # same, in PagedKVCache.values
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim] in the query's dtype; with latent attention, weighted latent vectors
        [num_rows, num_heads, latent_dim].
        """
