"""The tensors of a head's checkpoint, read once each: what is left over is refused rather than ignored."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Checkpoint, Target, check_target_ids

_NEVER_READ = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Of the training, or told by another tensor."""


class Weights:
    """Tensors by name, on a device, in a type."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self._left = {name for name in checkpoint.tensor_names if not name.endswith(_NEVER_READ)}

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensor_names

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises: ModelError when there is none, or of another shape."""
        self._left.discard(name)
        return self.checkpoint.tensor(name, shape).to(self.device, self.dtype)

    def take_if(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if self.has(name) else None

    def take_rows(self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], width: int) -> Linear:
        """Projections of the same input, as one. Biases are added where the checkpoint has them."""
        weight = torch.cat(
            [self.take(f"{prefix}{name}.weight", size, width) for name, size in zip(names, sizes, strict=True)]
        )
        biases = [self.take_if(f"{prefix}{name}.bias", size) for name, size in zip(names, sizes, strict=True)]
        if all(bias is None for bias in biases):
            return Linear(weight, None)
        parts = zip(biases, sizes, strict=True)
        return Linear(weight, torch.cat([weight.new_zeros(size) if bias is None else bias for bias, size in parts]))

    def drop(self, *names: str) -> None:
        """Says that these are not needed here."""
        self._left.difference_update(names)

    def check_all_read(self) -> None:
        """Raises: ConfigError that names tensors which this form does not know."""
        if self._left:
            names = ", ".join(sorted(self._left)[:8])
            raise ConfigError(f"head {self.checkpoint.folder} has tensors that its form does not know: {names}")


class Linear:
    """x · weightᵀ + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [num_out, num_in]
        self.bias = bias  # [num_out]

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, self.weight, self.bias)

    def halves(self) -> tuple[Linear, Linear]:
        """Of the outputs."""
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        first, second = map(Linear, self.weight.chunk(2), biases)
        return first, second


def take_embedding(weights: Weights, target: Target, vocab_size: int, width: int) -> Tensor:
    """[vocab_size, width]: the head's own, or else the target's."""
    own = weights.take_if("embed_tokens.weight", vocab_size, width)
    return _of_target(weights, target.embedding(), vocab_size, width) if own is None else own


def take_output_layer(
    weights: Weights, target: Target, target_ids: Tensor | None, vocab_size: int, width: int
) -> Linear:
    """The layer that gives logits: the head's own, or else those rows of the target's that the head can draft."""
    num_ids = vocab_size if target_ids is None else len(target_ids)
    own = weights.take_if("lm_head.weight", num_ids, width)
    if own is not None:
        return Linear(own, None)
    layer = _of_target(weights, target.output_layer(), vocab_size, width)
    return Linear(layer if target_ids is None else layer[target_ids], None)


def take_target_ids(weights: Weights, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """[draft_vocab_size] int64: the target's id of each of the head's; None where both count alike.

    `d2t` says how far each of the head's ids is from the target's. Raises: ModelError for ids outside the vocabulary.
    """
    weights.drop("d2t")
    if draft_vocab_size == vocab_size and not weights.has("d2t"):
        return None
    offsets = weights.checkpoint.mapped("d2t", (draft_vocab_size,)).to(torch.int64)
    target_ids = torch.arange(draft_vocab_size) + offsets
    check_target_ids(weights.checkpoint.folder, "d2t", target_ids, vocab_size)
    return target_ids.to(weights.device) if draft_vocab_size < vocab_size or offsets.any() else None


def _of_target(weights: Weights, tensor: Tensor, vocab_size: int, width: int) -> Tensor:
    if tuple(tensor.shape) != (vocab_size, width):
        folder = weights.checkpoint.folder
        raise ModelError(f"{folder} lacks a tensor, and its target's is {tuple(tensor.shape)}, not {vocab_size, width}")
    return tensor.to(weights.device, weights.dtype)
