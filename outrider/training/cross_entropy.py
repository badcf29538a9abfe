"""The cross-entropy with which heads are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 64  # rows of logits that fit into a processor's caches


class CrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits with the target's distributions.

    Rows of logits are visited in pieces that stay in a processor's caches, and gradients are computed at once.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shares: Tensor, places: Tensor) -> Tensor:
        """`logits`: [n, v] float32; `shares`: [m, v]; `places`: [n] int64, rows of `shares`. Returns [n]."""
        losses, slopes = logits.new_empty(len(logits)), torch.empty_like(logits)
        for start in range(0, len(logits), CHUNK_ROWS):
            piece = slice(start, start + CHUNK_ROWS)
            wanted, logs = shares[places[piece]], torch.log_softmax(logits[piece], -1)
            torch.sum(wanted * logs, -1, out=losses[piece])
            torch.sub(logs.exp_(), wanted, out=slopes[piece])
        ctx.save_for_backward(slopes)
        return losses.neg_()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * slopes[0][:, None], None, None
