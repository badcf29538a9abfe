"""Attention of prompts with FlashAttention-2 (Dao 2023, arXiv 2307.08691), in torch or in the flash-attn package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.input_batch import InputBatch
from outrider.engine.transfer import upload

MIN_ROWS = 256
"""Minimum mean number of rows per sequence for FlashAttention. Copying a key takes about as long as attending to it
with 80 rows, so with 256 or more rows the copy is the smaller part."""
MAX_GATHERED_KEYS = 1 << 16
"""Maximum number of keys of several sequences that are gathered for one layer: 0.27 GB with 8 heads of 128. Without
this limit, many sequences with a common prefix could need several times the memory of the cache. A single sequence may
have more keys, up to the context window, which the warm-up has tried."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a batch of long prompt chunks, with the slots of all their keys."""

    query_start_loc: Tensor  # [num_seqs + 1] int32
    key_start_loc: Tensor  # [num_seqs + 1] int32: where the gathered keys of each sequence start
    slots: Tensor  # [num_keys] int64
    max_num_rows: int
    max_seq_len: int
    steps_plan: Any  # the plan of the other backend, for layers that FlashAttention cannot compute


class FlashAttention(AttentionBackend):
    """A backend for long prompt chunks: FlashAttention over gathered keys. Another backend, `steps`, computes
    everything else, including draft trees and layers with sinks.

    FlashAttention follows block tables only if a block has a multiple of 256 tokens. To allow blocks of any size, keys
    are gathered first, for each layer, which takes a few percent of the time of a long chunk.
    """

    def __init__(self, name: str, device: torch.device | str, steps: AttentionBackend) -> None:
        """Args:
        name: "varlen_attn" (in torch from 2.11 on; no soft cap) or "flash_attn", the package.
        device: the model's device.
        steps: the backend for everything except prompt chunks.
        """
        if name == "flash_attn":
            from flash_attn import flash_attn_varlen_func as compute
        else:
            from torch.nn.attention.varlen import varlen_attn as compute
        self.name = name
        self.can_be_captured = steps.can_be_captured
        self._compute: Callable[..., Tensor] = compute
        self._options = inspect.signature(compute).parameters
        self._device = torch.device(device)
        self._steps = steps

    def plan(self, batch: InputBatch) -> InputBatch:
        """Plans with the backend `steps`, which may have to compute some layers of any batch."""
        return self._steps.plan(batch)

    def prepare(self, batch: InputBatch, group: int = 0) -> Any:
        """Returns this backend's plan for a batch of long prompt chunks, or the plan of `steps` for other batches."""
        steps_plan = self._steps.prepare(batch, group)
        arrays = batch.arrays
        if batch.is_padded or batch.has_trees or batch.num_rows < MIN_ROWS * batch.num_seqs:
            return steps_plan
        if sum(arrays.seq_lens) > max(MAX_GATHERED_KEYS, *arrays.seq_lens):
            return steps_plan
        slots = [batch.context_slots(sequence, length, group) for sequence, length in enumerate(arrays.seq_lens)]
        ends = np.fromiter(accumulate(arrays.seq_lens, initial=0), dtype=np.int32)
        return _Plan(
            query_start_loc=batch.on(self._device).query_start_loc,
            key_start_loc=upload(ends, self._device),
            slots=upload(np.concatenate(slots), self._device),
            max_num_rows=max(end - start for start, end in pairwise(arrays.query_start_loc)),
            max_seq_len=max(arrays.seq_lens),
            steps_plan=steps_plan,
        )

    def attend(
        self,
        plan: Any,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        if not isinstance(plan, _Plan):
            return self._steps.attend(plan, query, key_cache, value_cache, options)
        scale, softcap, head_dim = options.scaling, options.softcap, query.shape[2]
        lacks_cap = softcap is not None and "softcap" not in self._options
        if lacks_cap or options.sinks is not None or head_dim > 256 or head_dim % 8:
            return self._steps.attend(plan.steps_plan, query, key_cache, value_cache, options)
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        # Since version 2.13, torch needs a flag for shared key heads; earlier versions have no such argument.
        wanted = {"scale": scale, "softmax_scale": scale, "softcap": softcap or 0.0, "enable_gqa": True}
        return self._compute(
            query.contiguous(),
            *(cache.flatten(0, 1).index_select(0, plan.slots) for cache in (key_cache, value_cache)),
            plan.query_start_loc,
            plan.key_start_loc,
            plan.max_num_rows,
            plan.max_seq_len,
            window_size=(window, 0),  # a sequence's last row is at its last key
            **{name: value for name, value in wanted.items() if name in self._options},
        )
