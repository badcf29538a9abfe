"""The loss of a draft head, with its gradient made in one pass over the logits, which are most of the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SoftCrossEntropy(torch.autograd.Function):
    """(logits [n, v], shares [n, v], weights [n]) → (loss [], choice [n] int64).

    Loss: the weighted mean cross-entropy of softmax(logits) to the target's distribution; its gradient is that of
    the KL divergence. Choice: the likeliest token of each row.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, shares: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        values = logits.float()
        choice = values.argmax(-1)
        logs = torch.log_softmax(values, -1)
        loss = -(logs * shares).sum(-1)
        weights = weights / weights.sum().clamp_min(1)
        gradient = logs.exp_().sub_(shares).mul_(weights[:, None])
        context.save_for_backward(gradient.to(logits.dtype))
        context.mark_non_differentiable(choice)
        return (loss * weights).sum(), choice

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * gradients[0], None, None
