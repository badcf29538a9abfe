"""Prompts by the flash-attn package: CUDA, float16 and bfloat16 (Dao 2023, arXiv 2307.08691)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.input_batch import InputBatch
from outrider.engine.transfer import upload

LEAST_ROWS = 256
"""Of a sequence, on average. Copying a key takes about as long as attending to it with 80 rows, so with 256 or more
the copy is the smaller part."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch of prompts, and where all of their keys are."""

    query_start_loc: Tensor  # [num_seqs + 1] int32
    key_start_loc: Tensor  # [num_seqs + 1] int32, of the gathered keys
    slots: Tensor  # [num_keys] int64
    max_num_rows: int
    max_seq_len: int


class FlashAttention:
    """Prompt chunks by flash-attn over gathered keys; everything else, draft trees too, by another backend.

    flash-attn follows block tables only where a block has a multiple of 256 tokens. So that blocks may have any size,
    keys are laid side by side first, for each layer: some percent of the time of a long chunk.
    """

    name = "flash_attn"

    def __init__(self, device: torch.device | str, steps: AttentionBackend) -> None:
        """`steps`: computes all that are no prompt chunks."""
        self._device = torch.device(device)
        self._steps = steps
        self.can_be_captured = steps.can_be_captured

    def plan(self, batch: InputBatch) -> InputBatch:
        return self._steps.plan(batch) if self._is_step(batch) else batch

    def prepare(self, batch: InputBatch) -> Any:
        """A plan of the backend that computes the batch."""
        if self._is_step(batch):
            return self._steps.prepare(batch)
        arrays = batch.arrays
        slots = [batch.context_slots(sequence, length) for sequence, length in enumerate(arrays.seq_lens)]
        ends = np.fromiter(accumulate(arrays.seq_lens, initial=0), dtype=np.int32)
        return _Plan(
            query_start_loc=batch.on(self._device).query_start_loc,
            key_start_loc=upload(ends, self._device),
            slots=upload(np.concatenate(slots), self._device),
            max_num_rows=max(end - start for start, end in pairwise(arrays.query_start_loc)),
            max_seq_len=max(arrays.seq_lens),
        )

    @staticmethod
    def _is_step(batch: InputBatch) -> bool:
        return batch.is_padded or batch.has_trees or batch.num_rows < LEAST_ROWS * batch.num_seqs

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
        keys, values = (cache.flatten(0, 1).index_select(0, plan.slots) for cache in (key_cache, value_cache))
        output: Tensor = flash_attn_varlen_func(
            query.contiguous(),
            keys,  # [num_keys, num_kv_heads, head_dim]
            values,
            cu_seqlens_q=plan.query_start_loc,
            cu_seqlens_k=plan.key_start_loc,
            max_seqlen_q=plan.max_num_rows,
            max_seqlen_k=plan.max_seq_len,
            softmax_scale=options.scaling,
            causal=True,  # aligned to the last key, which is what rows at the end of a sequence need
            window_size=(-1, -1) if options.sliding_window is None else (options.sliding_window - 1, 0),
            softcap=options.softcap or 0.0,
        )
        return output
