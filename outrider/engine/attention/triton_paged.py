"""Paged attention with our Triton kernel, which reads blocks of any size in place. A row's bits are independent of its
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.gpu_kernels.attention import attend, merge_splits
from outrider.engine.gpu_kernels.work_list import HEADER_INTS, Tile, WorkLists
from outrider.engine.input_batch import BatchFields, InputBatch

PROGRAMS_PER_PROCESSOR = 2
"""Number of kernel programs per multiprocessor: the most that its registers allow."""
MAX_MERGING_PROGRAMS = 64
"""Maximum number of programs per head that merge cut tiles."""
MAX_BLOCK_BYTES = 16 << 10
"""Maximum bytes of keys that a program loads at a time. Values take as many bytes again. With three pipeline stages,
64 KiB of keys and values are in shared memory."""


_Plan = tuple[InputBatch, BatchFields[Tensor], int]
"""One forward's planned batch, its fields on the device, and the group of layers."""


class TritonAttention(AttentionBackend):
    """A backend with one launch for all rows of all sequences, and a second launch that merges tiles that were cut."""

    name = "triton"
    can_be_captured = True

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        num_heads: int,
        num_kv_heads: int,
        tile: Tile | None = None,
        num_programs: int | None = None,
    ) -> None:
        """`num_programs`: number of kernel programs; by default as many as the GPU runs concurrently."""
        self._device = torch.device(device)
        if num_programs is None:
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
            num_programs = PROGRAMS_PER_PROCESSOR * processors
        self._num_programs = num_programs
        self._tile = tile or Tile()
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._lists = WorkLists(self._tile, num_heads=num_heads, num_kv_heads=num_kv_heads, num_programs=num_programs)

    def plan(self, batch: InputBatch) -> InputBatch:
        """Implements AttentionBackend.plan."""
        if batch.arrays.attention_plan:
            return batch
        return batch.with_plan(self._lists.plan(batch))

    def prepare(self, batch: InputBatch, group: int = 0) -> _Plan:
        batch = self.plan(batch)
        return batch, batch.on(self._device), group

    def attend(
        self,
        plan: _Plan,
        query: Tensor,  # [num_rows, num_heads, head_dim], in the caches' floating dtype
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        tile, (batch, fields, group) = self._tile, plan
        _, num_heads, head_dim = query.shape
        num_kv_heads = key_cache.shape[2]
        assert (num_heads, num_kv_heads) == (self._num_heads, self._num_kv_heads), (
            "the backend was made for other numbers of heads"
        )
        padded_dim = max(16, 1 << (head_dim - 1).bit_length())
        keys_per_block = min(tile.keys, max(16, MAX_BLOCK_BYTES // (padded_dim * key_cache.element_size())))
        num_items, _, num_rows, num_merged, _ = batch.arrays.attention_plan[:HEADER_INTS]
        if batch.is_padded:  # uses the largest counts of any batch of this shape
            num_items, num_merged = self._lists.max_items(num_rows), num_rows
        num_partials = num_merged and self._lists.max_partials
        query = query.contiguous()
        output = torch.empty_like(query)
        # Three tensors instead of parts of one: a kernel is compiled anew for each alignment of its arguments.
        values = torch.empty((num_partials, num_heads, padded_dim), dtype=torch.float32, device=query.device)
        largest = torch.empty((num_partials, num_heads), dtype=torch.float32, device=query.device)
        totals = torch.empty_like(largest)
        heads_per_kv = num_heads // num_kv_heads
        window = options.sliding_window or 0
        sinks = totals if options.sinks is None else options.sinks
        splits = {"SPLIT_KEYS": tile.split_keys, "SPLITS_PER_SIZE": tile.splits_per_size, "HAS_WINDOW": window > 0}
        splits["HAS_SINKS"] = options.sinks is not None
        with torch.cuda.device_of(query):  # triton launches on the current device
            attend[(min(num_items * self._lists.head_groups, self._num_programs),)](
                query, key_cache, value_cache, output, values, largest, totals, fields.positions, fields.block_tables,
                fields.path_starts, batch.paths_on(self._device, group), fields.attention_plan,
                options.scaling, options.softcap or 0.0, window, sinks,
                HEADS_PER_KV=heads_per_kv, HEADS_PER_TILE=min(heads_per_kv, tile.lines), NUM_KV_HEADS=num_kv_heads,
                HEAD=head_dim, HEAD_DIM=padded_dim, BLOCK_SIZE=batch.block_size, LINES=tile.lines,
                KEYS=keys_per_block, **splits, HAS_SOFTCAP=options.softcap is not None, HAS_PATHS=batch.has_trees,
                GROUP=group,
                num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
            )  # fmt: skip
            if num_merged:
                merge_splits[min(num_rows, MAX_MERGING_PROGRAMS), num_heads](
                    values, largest, totals, output, fields.positions, fields.attention_plan, window, sinks,
                    NUM_HEADS=num_heads, HEAD=head_dim, HEAD_DIM=padded_dim, **splits,
                    num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip
        return output
