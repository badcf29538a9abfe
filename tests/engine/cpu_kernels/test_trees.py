"""Trees of drafts: a row's attention has the same bits in the tree as alone after its own path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.input_batch import SequenceRows, build_input_batch
from tests.engine.cpu_kernels.operations import differing_rows, paged_attention
from tests.speculation.draft_trees import SHAPES, path_to, shapes

BLOCK_SIZE = 16
HEAD_DIM = 32


class Tree:
    """The queries, keys and values of a context and of drafts after it.

    Keys and values are [length, num_kv_heads, head_dim], in the order of slots.
    """

    def __init__(self, *, before, known, parents, group, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        self.before, self.known, self.parents, self.dtype = before, known, parents, dtype
        length = before + known + len(parents)
        self.keys, self.values = (torch.randn((length, 2, HEAD_DIM), generator=generator).to(dtype) for _ in range(2))
        self.queries = torch.randn((known + len(parents), 2 * group, HEAD_DIM), generator=generator).to(dtype)

    def cache(self, order):
        """Puts the keys and values of these slots into shuffled blocks. Returns (key cache, value cache, table)."""
        num_blocks = -(-len(order) // BLOCK_SIZE)
        table = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(len(order)))[
            :num_blocks
        ].tolist()
        caches = [
            torch.full((num_blocks + 2, BLOCK_SIZE, 2, HEAD_DIM), float("nan"), dtype=self.dtype) for _ in range(2)
        ]
        for cache, tokens in zip(caches, (self.keys, self.values), strict=True):
            for place, slot in enumerate(order):
                cache[table[place // BLOCK_SIZE], place % BLOCK_SIZE] = tokens[slot]
        return *caches, table

    def together(self, kernels, options):
        """Computes all rows in one batch, between two sequences without trees."""
        keys, values, table = self.cache(range(len(self.keys)))
        other = SequenceRows([0], self.before, table, 1)
        batch = build_input_batch(
            [other, SequenceRows([0] * len(self.queries), self.before, table, 1, self.parents), other], BLOCK_SIZE
        )
        query = torch.cat([self.queries[:1], self.queries, self.queries[:1]])
        return paged_attention(kernels, query, keys, values, batch, options)[1:-1]

    def alone(self, kernels, options):
        """Computes each row by itself, like plain decoding after its own path."""
        context = self.before + self.known
        orders = [range(self.before + row + 1) for row in range(self.known)]
        orders += [
            [*range(context), *(context + each for each in path_to(self.parents, draft))]
            for draft in range(len(self.parents))
        ]
        rows = []
        for row, order in enumerate(orders):
            keys, values, table = self.cache(order)
            batch = build_input_batch([SequenceRows([0], len(order) - 1, table, 1)], BLOCK_SIZE)
            rows.append(paged_attention(kernels, self.queries[row : row + 1], keys, values, batch, options))
        return torch.cat(rows)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.one_of(st.integers(0, 40), st.integers(240, 262), st.integers(500, 520)),
    known=st.sampled_from([1, 1, 1, 7, 35]),
    parents=shapes(),
    group=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.one_of(st.none(), st.integers(1, 20), st.integers(250, 300)),
    softcap=st.sampled_from([None, 2.0]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_any_tree_behind_any_context(
    library, teams, before, known, parents, group, dtype, window, softcap, num_threads, seed
):
    tree = Tree(before=before, known=known, parents=parents, group=group, dtype=dtype, seed=seed)
    options = AttentionOptions(0.2, sliding_window=window, softcap=softcap)
    together = tree.together(teams(library, num_threads), options)
    assert differing_rows(together, tree.alone(teams(library, 1), options)) == []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_mask_alone_would_not_do(kernels, shape):
    """Negative control: if the rows are computed as a chain, bits differ unless the tree is a chain."""
    tree = Tree(before=250, known=1, parents=shape, group=3, dtype=torch.float32, seed=0)
    options = AttentionOptions(0.2)
    keys, values, table = tree.cache(range(len(tree.keys)))
    batch = build_input_batch([SequenceRows([0] * len(tree.queries), tree.before, table, 1)], BLOCK_SIZE)
    as_chain = paged_attention(kernels, tree.queries, keys, values, batch, options)
    is_chain = shape == tuple(range(-1, len(shape) - 1))
    assert (differing_rows(as_chain, tree.alone(kernels, options)) == []) is is_chain
