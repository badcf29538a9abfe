"""A model with its own paged cache, for computations in tests."""

from __future__ import annotations

import random

import numpy as np
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import StatePool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.state_table import StateTable
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.engine.model_runner import make_runner


class CachedRunner:
    """The runner of `model`, its cache with one scratch block, and blocks that are handed out in random order.

    `options` are those of make_runner: the graphs and the reduction of features.
    """

    def __init__(self, model, *, num_blocks=64, block_size=16, attention=None, **options):
        self.model, self.block_size = model, block_size
        self.cache = PagedKVCache(
            model.spec.planes,
            layer_groups=model.spec.layer_groups,
            num_blocks=num_blocks,
            block_size=block_size,
            num_scratch_blocks=1,
            kernels=model.cpu_kernels,
            state_slots=num_blocks if model.spec.linear else 0,
        )
        self._state_pool = (
            StatePool(num_blocks=num_blocks, block_size=block_size, hash_seed=b"") if model.spec.linear else None
        )
        self.states = None  # of the sequence that `prefill` has computed last, if the model has some

        attention = attention or make_attention_backend("auto", model.device)
        self.runner = make_runner(model, self.cache, attention, **options)
        self._free = random.Random(0).sample(range(num_blocks), num_blocks)

    def table(self, num_tokens):
        """Hands out blocks for `num_tokens` tokens, and returns the blocks' ids."""
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def slots(self, table, positions):
        """Returns the slots of a sequence's tokens: [num_positions] int64."""
        return np.array([table[at // self.block_size] * self.block_size + at % self.block_size for at in positions])

    def forward(self, *rows, **options):
        """Returns a copy of the logits that the rows ask for: [num_logits, vocab_size] float32."""
        return torch.as_tensor(self.runner.forward(build_input_batch(rows, self.block_size), **options)).clone()

    def prefill(self, token_ids, table, *, chunk=None, num_logits=None, **options):
        """Returns the logits of all tokens, or of at most `num_logits` at the end of each chunk of `chunk` tokens."""
        size = chunk or len(token_ids)
        parts = [(token_ids[start : start + size], start) for start in range(0, len(token_ids), size)]
        wanted = size if num_logits is None else num_logits
        self.states = self._state_pool and StateTable(self._state_pool)
        logits = []
        for part, start in parts:
            rows = SequenceRows(part, start, table, min(wanted, len(part)))
            if self.states:
                self.states.reserve(start, start + len(part))
                rows = rows._replace(states=self.states.plan(start, start + len(part)))
            logits.append(self.forward(rows, **options))
        return torch.cat(logits)

    def features(self, plane_name, table, positions):
        """Returns the features of a sequence's tokens: [num_positions, width] in the model's dtype."""
        taken = self.cache.read(plane_name, range(1), self.slots(table, positions))
        return torch.from_numpy(taken).view(TORCH_DTYPES[self.model.spec.dtype]).view(len(positions), -1)
