"""MLPSpeculator (Wertheimer et al. 2024, arXiv 2404.19124) in training; exported in the layout of its owners.

A recurrent state, from the target's last hidden state on, takes one drafted token a step. Stages share their weights.
The layout has rows for the whole vocabulary; those of tokens that are not drafted are zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.training.forms.base import Chains, DraftVocabulary, Student, linear, output_layer

EPSILON = 1e-6


class MLPStudent(Student):
    """`num_stages` draft tokens."""

    def __init__(self, vocabulary: DraftVocabulary, num_stages: int) -> None:
        super().__init__()
        self.vocabulary, self.num_stages = vocabulary, num_stages
        width, embedding = vocabulary.embedding.shape[1], vocabulary.embedding.float()
        self.emb = nn.Parameter(embedding * torch.rsqrt(embedding.square().mean()))
        self.proj = nn.ModuleList(linear(width, width) for _ in range(min(num_stages, 2)))
        self.ln_weight, self.ln_bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.lm_head = output_layer(vocabulary)
        self._state_weight = 0.5 ** (0.5 / num_stages)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * width / 2)

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        return Chains(_normed(features[:, first:]) * 0.5**0.5)

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        projected = self.proj[min(chains.depth, len(self.proj) - 1)](chains.hidden)
        tokens = functional.embedding(token_ids[:, -projected.shape[1] :], self.emb)
        state = _normed(projected * self._state_weight + tokens * self._token_weight)
        chains.hidden, chains.depth = functional.gelu(state * self.ln_weight + self.ln_bias), chains.depth + 1
        return chains.hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def tensors(self) -> dict[str, Tensor]:
        output = torch.zeros(self.emb.shape, device=self.emb.device)
        output[self.vocabulary.target_ids] = self.lm_head.weight.detach()
        return {
            "speculator.emb.0.weight": self.emb,
            "speculator.head.0.weight": output,
            "speculator.ln.0.weight": self.ln_weight,
            "speculator.ln.0.bias": self.ln_bias,
            **{f"speculator.{name}": weight for name, weight in self.named_parameters() if name.startswith("proj.")},
        }

    def config(self) -> Mapping[str, Any]:
        vocab_size, width = self.emb.shape
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": width,
            "inner_dim": width,
            "n_predict": self.num_stages,
            "n_candidates": self.num_stages,
            "top_k_tokens_per_head": [1] * self.num_stages,
            "vocab_size": vocab_size,
            "tie_weights": True,
            "scale_input": True,
            "torch_dtype": "bfloat16",
        }


def _normed(values: Tensor) -> Tensor:
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(values.dtype)
