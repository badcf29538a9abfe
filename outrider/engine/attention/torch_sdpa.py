"""Paged attention with torch's own operations, one sequence at a time. It runs on every device and in every dtype."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.input_batch import InputBatch
from outrider.engine.transfer import upload


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """The rows of one sequence, and the keys that at least one of them sees."""

    first_row: int
    num_rows: int
    slots: Tensor  # [num_keys] int64, the slots of these keys
    seen: Tensor | None  # [num_rows, num_keys] bool; None: every row sees every key


class _Plan:
    """A batch's plans, made once for each window that a layer uses."""

    def __init__(self, batch: InputBatch, device: torch.device, group: int) -> None:
        self._batch = batch
        self._group = group
        self._device = device
        self._by_window: dict[int | None, list[_SequencePlan]] = {}

    def sequences(self, window: int | None) -> list[_SequencePlan]:
        """Returns the plans of all sequences that have rows."""
        if window not in self._by_window:
            bounds = enumerate(pairwise(self._batch.arrays.query_start_loc))
            self._by_window[window] = [self._plan(seq, *rows, window) for seq, rows in bounds if rows[0] < rows[1]]
        return self._by_window[window]

    def _plan(self, sequence: int, first_row: int, end_row: int, window: int | None) -> _SequencePlan:
        arrays, num_rows, num_keys = self._batch.arrays, end_row - first_row, self._batch.arrays.seq_lens[sequence]
        slots = self._batch.context_slots(sequence, num_keys, self._group)
        num_depths = len(arrays.path_slots) // self._batch.num_groups
        path_slots = arrays.path_slots[self._group * num_depths :]
        positions, num_before = np.array(arrays.positions[first_row:end_row]), num_keys - num_rows
        key_positions = np.concatenate([np.arange(num_before), positions])
        distance = positions[:, None] - key_positions
        seen = distance >= 0
        if self._batch.has_trees:
            paths = list(pairwise(arrays.path_starts[first_row : end_row + 1]))
            drafts = [row for row, (start, end) in enumerate(paths) if start < end]
            keys = num_before + np.array(drafts, dtype=np.int64)
            for row in drafts:
                seen[row, keys] = np.isin(slots[keys], path_slots[slice(*paths[row])])
        first_key = 0
        if window is not None:
            seen &= distance < window
            first_key = max(0, num_before - window + 1)
        return _SequencePlan(
            first_row,
            num_rows,
            upload(slots[first_key:], self._device),
            None if seen.all() else upload(seen[:, first_key:], self._device),
        )


class TorchSdpaAttention(AttentionBackend):
    """A backend that gathers the keys of each sequence and calls torch's scaled_dot_product_attention.

    With a soft cap or sinks, and on a GPU, it computes the same with separate operations. On a GPU, torch's
    memory-efficient kernel was seen to return wrong results for keys that several query heads share without a copy.
    """

    name = "torch_sdpa"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def prepare(self, batch: InputBatch, group: int = 0) -> _Plan:
        """Returns an empty plan. The part for a window is made when the first layer with that window needs it."""
        return _Plan(batch, self._device, group)

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
            _attend(sequence, query.narrow(0, sequence.first_row, sequence.num_rows), key_cache, value_cache, options)
            for sequence in plan.sequences(options.sliding_window)
        ])  # fmt: skip


def _attend(
    plan: _SequencePlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions
) -> Tensor:
    """Returns the output of one sequence's rows: [num_rows, num_heads, head_dim].

    KV heads are torch's batch dimension, so keys are not copied for each query head.
    """
    num_kv_heads = key_cache.shape[2]
    rows = query.unflatten(1, (num_kv_heads, -1)).permute(
        1, 2, 0, 3
    )  # [num_kv_heads, heads_per_kv, num_rows, head_dim]
    keys, values = (cache.flatten(0, 1).index_select(0, plan.slots) for cache in (key_cache, value_cache))
    if options.latent_dim:
        keys = torch.cat([values, keys], -1)
    keys, values = (
        each.transpose(0, 1).unsqueeze(1).expand(-1, rows.shape[1], -1, -1) for each in (keys, values)
    )  # [num_kv_heads, heads_per_kv, num_keys, head_dim]
    if options.softcap is None and options.sinks is None and not query.is_cuda:
        output = scaled_dot_product_attention(rows, keys, values, attn_mask=plan.seen, scale=options.scaling)
    else:
        scores = torch.matmul(rows, keys.transpose(-1, -2)).float() * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if plan.seen is not None:
            scores = torch.where(plan.seen, scores, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
        output = torch.matmul(weights.to(query.dtype), values)
    return output.permute(2, 0, 1, 3).flatten(1, 2)
