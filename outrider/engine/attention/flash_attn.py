"""Paged attention with the flash-attn package: CUDA, float16 and bfloat16 (Dao 2023, arXiv 2307.08691)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.attention.torch_sdpa import TorchSdpaAttention
from outrider.engine.gpu_kernels import why_no_triton
from outrider.engine.input_batch import InputBatch
from outrider.errors import ConfigError

BLOCK_SIZE = 256
"""flash-attn 2 follows a block table only where blocks are a multiple of this; a longer one only wastes memory."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The batch's metadata on the GPU."""

    query_start_loc: Tensor  # [num_seqs + 1] int32
    key_start_loc: Tensor  # [num_seqs + 1] int32, of the tokens
    max_num_rows: int
    max_seq_len: int
    block_tables: Tensor  # [num_seqs, max_blocks] int32


class FlashAttention:
    """One kernel for all rows of all sequences, whatever their lengths; keys and values are read where they lie."""

    name = "flash_attn"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._of_trees = _attention_of_trees(self._device)

    def block_size(self, wanted: int | None) -> int:
        """Raises ConfigError where the kernel cannot follow blocks of the wanted size."""
        if wanted not in (None, BLOCK_SIZE):
            raise ConfigError(
                f"kv_cache.block_size {wanted}: flash-attn reads blocks of {BLOCK_SIZE} tokens; leave it unset, or set "
                "model.attention to torch_sdpa"
            )
        return BLOCK_SIZE

    def prepare(self, batch: InputBatch) -> Any:
        """What the kernel reads on the GPU, and what it is launched with.

        The kernel reads keys by block table only: a batch with trees of drafts is left to our own kernel, or torch.
        """
        if batch.has_trees:
            return self._of_trees.prepare(batch)
        arrays, on_device = batch.arrays, batch.on(self._device)
        return _Plan(
            query_start_loc=on_device.query_start_loc,
            key_start_loc=pad(on_device.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_num_rows=max(end - start for start, end in pairwise(arrays.query_start_loc)),
            max_seq_len=max(arrays.seq_lens),
            block_tables=on_device.block_tables,
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
            return self._of_trees.attend(plan, query, key_cache, value_cache, options)
        window = (-1, -1) if options.sliding_window is None else (options.sliding_window - 1, 0)
        output: Tensor = flash_attn_varlen_func(
            query.contiguous(),
            key_cache,
            value_cache,
            cu_seqlens_q=plan.query_start_loc,
            cu_seqlens_k=plan.key_start_loc,
            max_seqlen_q=plan.max_num_rows,
            max_seqlen_k=plan.max_seq_len,
            softmax_scale=options.scaling,
            causal=True,  # aligned to the last key, which is what rows at the end of a sequence need
            window_size=window,
            softcap=options.softcap or 0.0,
            block_table=plan.block_tables,
        )
        return output


def _attention_of_trees(device: torch.device) -> AttentionBackend:
    """Over the same blocks."""
    if why_no_triton(device):
        return TorchSdpaAttention(device)
    from outrider.engine.attention.triton_paged import TritonAttention

    return TritonAttention(device)
