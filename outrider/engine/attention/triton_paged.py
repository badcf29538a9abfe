"""Paged attention by our own Triton kernel: blocks of any size, read in place, the same bits for a row in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.gpu_kernels.attention import Tile, attend, merge_splits
from outrider.engine.input_batch import BatchFields, InputBatch

_MOST_SPLIT_ROWS = 256
"""With more rows there are tiles enough to fill a GPU, and splits would only cost memory."""
MOST_BLOCK_BYTES = 16 << 10
"""Of the keys of a block, which are in shared memory twice, as are their values: 64 KiB, less than any GPU has."""


_Plan = tuple[InputBatch, BatchFields[Tensor]]
"""One forward's batch, and its fields on the device."""


class TritonAttention:
    """One launch for all rows of all sequences, and one that merges splits where rows are few."""

    name = "triton"
    can_be_captured = True

    def __init__(self, device: torch.device | str = "cuda", tile: Tile | None = None) -> None:
        self._device = torch.device(device)
        self._tile = tile or Tile()

    def prepare(self, batch: InputBatch) -> _Plan:
        return batch, batch.on(self._device)

    def attend(
        self,
        plan: _Plan,
        query: Tensor,  # [num_rows, num_heads, head_dim], any floating dtype, that of the caches
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        tile, (batch, fields) = self._tile, plan
        num_rows, num_seqs = batch.num_rows, batch.num_seqs
        _, num_heads, head_dim = query.shape
        num_kv_heads = key_cache.shape[2]
        padded_dim = max(16, 1 << (head_dim - 1).bit_length())
        keys_per_block = min(tile.keys, max(16, MOST_BLOCK_BYTES // (padded_dim * key_cache.element_size())))
        max_splits = -(-max(batch.arrays.seq_lens) // tile.split_keys)
        is_split = not batch.is_padded and max_splits > 1 and num_rows <= _MOST_SPLIT_ROWS
        query = query.contiguous()
        output = torch.empty_like(query)
        partials = (num_rows, num_heads, max_splits) if is_split else (0, 0, 0)
        values = torch.empty((*partials, padded_dim), dtype=torch.float32, device=query.device)
        largest, totals = torch.empty((2, *partials), dtype=torch.float32, device=query.device).unbind(0)
        heads_per_kv = num_heads // num_kv_heads
        heads_per_tile = min(heads_per_kv, tile.lines)
        num_tiles = num_rows // (tile.lines // heads_per_tile) + num_seqs
        head_groups = num_kv_heads * -(-heads_per_kv // heads_per_tile)
        grid = (num_tiles, head_groups, max_splits if is_split else 1)
        window = options.sliding_window or 0
        with torch.cuda.device_of(query):  # where triton launches
            attend[grid](
                query, key_cache, value_cache, output, values, largest, totals,
                fields.query_start_loc, fields.positions, fields.block_tables, fields.table_starts,
                fields.path_starts, fields.path_slots, num_seqs, max_splits,
                options.scaling, options.softcap or 0.0, window,
                HEADS_PER_KV=heads_per_kv, HEADS_PER_TILE=heads_per_tile, NUM_KV_HEADS=num_kv_heads,
                HEAD=head_dim, HEAD_DIM=padded_dim, BLOCK_SIZE=batch.block_size, LINES=tile.lines,
                KEYS=keys_per_block, SPLIT_KEYS=tile.split_keys,
                HAS_WINDOW=window > 0, HAS_SOFTCAP=options.softcap is not None, HAS_PATHS=batch.has_trees,
                IS_SPLIT=is_split, num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
            )  # fmt: skip
            if is_split:
                merge_splits[num_rows, num_heads](
                    values, largest, totals, output, fields.positions, max_splits, window,
                    NUM_HEADS=num_heads, HEAD=head_dim, HEAD_DIM=padded_dim, SPLIT_KEYS=tile.split_keys,
                    HAS_WINDOW=window > 0, enable_fp_fusion=False,
                )  # fmt: skip
        return output
