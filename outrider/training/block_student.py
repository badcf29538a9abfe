"""A head in training that drafts a block of tokens in one forward (DSpark, arXiv 2607.05147).

Each token of an answer is the anchor of one block. The block's rows attend to the target's features before the anchor
and to each other. The Markov head gets the text's tokens, i.e. the drafts of a block that has been right so far.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from outrider.heads.base import HeadRows
from outrider.training.student import EVERY, Chains, Student, by_text, over_steps


class BlockStudent(Student):
    """A DSpark head whose weights are trained in float32. A chain is a block, and step j drafts its token j."""

    def step(self, chains: Chains, token_ids: Tensor) -> None:
        if chains.depth:
            chains.previous = torch.cat([chains.previous, token_ids[:, None]], -1)
        else:
            self._compute_blocks(chains, token_ids[-sum(chains.lengths) :])
        chains.depth += 1

    def _compute_blocks(self, chains: Chains, anchors: Tensor) -> None:
        """Computes the blocks of all chains. `anchors`: [num_chains] int64, the tokens after their features."""
        spec, context, num_blocks = self._head.spec, chains.hidden, len(anchors)
        size = 1 + spec.num_masks
        tokens = torch.full((num_blocks, size), spec.mask_token_id, device=self.device)
        tokens[:, 0] = anchors
        steps = 1 + torch.arange(size, device=self.device)
        positions = chains.positions[-num_blocks:, None] + steps
        rows = HeadRows(
            torch.cat([anchors.new_zeros(len(context)), tokens.flatten()]),
            torch.cat([context, context.new_zeros(num_blocks * size, context.shape[1])]),
            torch.cat([steps.new_zeros(len(context)), steps.repeat(num_blocks)]),
            torch.cat([chains.positions, positions.flatten()]),
        )
        hidden = self._head.forward(rows, partial(_attend, chains, size))[len(context) :]
        chains.hidden = hidden.unflatten(0, (num_blocks, size))[:, size - spec.num_parallel :]
        logits = self._head.logits(chains.hidden.flatten(0, 1), rows.depths[: num_blocks * spec.num_parallel])
        chains.block_logits, chains.previous = logits.unflatten(0, (num_blocks, -1)), anchors[:, None]

    def logits(self, chains: Chains, rows: Tensor | slice = EVERY) -> tuple[Tensor, Tensor | None]:
        logits, hidden = chains.block_logits[rows, chains.depth - 1], chains.hidden[rows, : chains.depth]
        return self._head.logits_after(logits, hidden, chains.previous[rows])


def _attend(
    chains: Chains, size: int, _layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Implements `Attend` for the blocks of `size` rows of all chains, which follow the true rows, text by text."""
    num_true, group = len(chains.positions), query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    true = zip(*(by_text(chains, each[:num_true]) for each in (key, value)), strict=True)
    of_blocks = (
        each[num_true:].unflatten(0, (-1, size)).permute(2, 0, 1, 3).split(list(chains.lengths), 1)
        for each in (query, key, value)
    )  # [num_heads, num_blocks, size, head_dim] by text
    seen = [
        over_steps(queries, [first, *zip(keys.unbind(2), values.unbind(2), strict=True)], scaling)
        for first, queries, keys, values in zip(true, *of_blocks, strict=True)
    ]
    return torch.cat([torch.zeros_like(query[:num_true]), *(each.permute(1, 2, 0, 3).flatten(0, 1) for each in seen)])
