"""Paged attention from torch's own operations: runs everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.input_batch import InputBatch


class TorchSdpaAttention:
    name = "torch_sdpa"

    def prepare(self, batch: InputBatch) -> InputBatch:
        return batch

    def attend(self, plan: InputBatch, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> Tensor:
        out = torch.empty_like(query)
        for i in range(plan.num_seqs):
            a, b, n = int(plan.query_start_loc[i]), int(plan.query_start_loc[i + 1]), int(plan.seq_lens[i])
            blocks = plan.block_tables[i, : -(-n // plan.block_size)]
            k = key_cache[blocks].flatten(0, 1)[:n].transpose(0, 1)
            v = value_cache[blocks].flatten(0, 1)[:n].transpose(0, 1)
            q = query[a:b].transpose(0, 1)
            d = torch.arange(n - (b - a), n)[:, None] - torch.arange(n)[None]
            mask = d >= 0
            if options.sliding_window is not None:
                mask &= d < options.sliding_window
            g = q.shape[0] // k.shape[0]
            s = q.unflatten(0, (-1, g)) @ k.unsqueeze(1).transpose(-1, -2) * options.scaling
            if options.softcap is not None:
                s = torch.tanh(s / options.softcap) * options.softcap
            s = s.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
            out[a:b] = (s @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1)
        return out
