"""Paged attention from torch's own operations: runs everywhere, in every dtype, one run of rows after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.input_batch import InputBatch
from outrider.engine.transfer import upload


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows of a sequence, each of which sees what the row before it sees, and itself."""

    first_row: int
    num_rows: int
    slots: Tensor  # [num_keys] int64, of the keys that any of its rows sees, in the order of positions
    seen: Tensor | None  # [num_rows, num_keys] bool; None: every row sees every key


class _Plan:
    """The runs of a batch, made once for each window that a layer asks for. A tree has a run for each branch."""

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._by_window: dict[int | None, list[_Run]] = {}

    def runs(self, window: int | None) -> list[_Run]:
        if window not in self._by_window:
            self._by_window[window] = [self._run(*bounds, window) for bounds in _bounds(self._batch)]
        return self._by_window[window]

    def _run(self, sequence: int, first_row: int, end_row: int, window: int | None) -> _Run:
        arrays, num_rows = self._batch.arrays, end_row - first_row
        num_keys = arrays.positions[end_row - 1] + 1
        slots = self._batch.context_slots(sequence, num_keys)
        if self._batch.has_trees:
            path = arrays.path_slots[arrays.path_starts[end_row - 1] : arrays.path_starts[end_row]]
            slots[num_keys - len(path) :] = path
        first_position = num_keys - num_rows
        first_key = 0 if window is None else max(0, first_position - window + 1)
        distance = np.arange(first_position, num_keys)[:, None] - np.arange(first_key, num_keys)[None]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return _Run(
            first_row,
            num_rows,
            upload(slots[first_key:], self._device),
            None if seen.all() else upload(seen, self._device),
        )


def _bounds(batch: InputBatch) -> Iterator[tuple[int, int, int]]:
    """Each run's sequence, first row and end row."""
    starts = batch.arrays.query_start_loc
    for sequence in range(batch.num_seqs):
        first_row, end_row = starts[sequence], starts[sequence + 1]
        for row in range(first_row + 1, end_row + 1):
            if row == end_row or (batch.has_trees and not _follows_row_before(batch, row)):
                yield sequence, first_row, row
                first_row = row


def _follows_row_before(batch: InputBatch, row: int) -> bool:
    """As in attention_plan.h."""
    arrays = batch.arrays
    end = arrays.path_starts[row + 1]
    depth = end - arrays.path_starts[row]
    if depth == 0:
        return True
    if arrays.positions[row] != arrays.positions[row - 1] + 1:
        return False
    return depth == 1 or arrays.path_slots[end - 2] == arrays.slot_mapping[row - 1]


class TorchSdpaAttention:
    """Gathers the keys of each run, then torch's scaled_dot_product_attention, or its formula for a soft cap."""

    name = "torch_sdpa"
    can_be_captured = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def plan(self, batch: InputBatch) -> InputBatch:
        return batch

    def prepare(self, batch: InputBatch) -> _Plan:
        """Runs are made when the first layer asks, since only it knows its window."""
        return _Plan(batch, self._device)

    def attend(
        self,
        plan: _Plan,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        return torch.cat([
            _attend(run, query.narrow(0, run.first_row, run.num_rows), key_cache, value_cache, options)
            for run in plan.runs(options.sliding_window)
        ])  # fmt: skip


def _attend(run: _Run, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> Tensor:
    """Of the run's rows only: [num_rows, num_heads, head_dim]. KV heads are torch's batch, so keys are not copied."""
    num_kv_heads = key_cache.shape[2]
    rows = query.unflatten(1, (num_kv_heads, -1)).permute(
        1, 2, 0, 3
    )  # [num_kv_heads, heads_per_kv, num_rows, head_dim]
    keys, values = (
        cache.flatten(0, 1).index_select(0, run.slots).transpose(0, 1).unsqueeze(1).expand(-1, rows.shape[1], -1, -1)
        for cache in (key_cache, value_cache)
    )  # [num_kv_heads, heads_per_kv, num_keys, head_dim]
    if options.softcap is None:
        output = scaled_dot_product_attention(rows, keys, values, attn_mask=run.seen, scale=options.scaling)
    else:
        scores = torch.matmul(rows, keys.transpose(-1, -2)).float() * options.scaling
        scores = torch.tanh(scores / options.softcap) * options.softcap
        if run.seen is not None:
            scores = scores.masked_fill(~run.seen, float("-inf"))
        output = torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), values)
    return output.permute(2, 0, 1, 3).flatten(1, 2)
