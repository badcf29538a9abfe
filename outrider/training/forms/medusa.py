"""Medusa (Cai et al. 2024, arXiv 2401.10774) in training: one block for each token ahead, over one output layer.

Exported in vLLM's layout, with a truncated vocabulary and the output layer that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.training.forms.base import Chains, DraftVocabulary, Student


class MedusaStudent(Student):
    """Begins as a target that repeats its own next token: blocks are zero."""

    def __init__(self, vocabulary: DraftVocabulary, num_heads: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        size, width = vocabulary.output_rows.shape
        blocks = [nn.Linear(width, width) for _ in range(num_heads)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.lm_head = nn.Linear(width, size, bias=False)
        self.lm_head.weight.data.copy_(vocabulary.output_rows)

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        return Chains(features, first)

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        if not chains.depth:
            chains.hidden = chains.hidden[:, chains.first :]
        chains.depth += 1
        return chains.hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(hidden + functional.silu(self.blocks[depth](hidden)))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        weights = {
            f"blocks.{index}.layers.0.{name}": getattr(block, name)
            for index, block in enumerate(self.blocks)
            for name in ("weight", "bias")
        } | {"lm_head.weight": self.lm_head.weight}
        found = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
        return found if self.vocabulary.is_whole else found | {"token_map": self.vocabulary.target_ids.cpu()}

    def config(self) -> Mapping[str, Any]:
        size, width = self.vocabulary.output_rows.shape
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "hidden_size": width,
            "vocab_size": len(self.vocabulary.draft_ids),
            "truncated_vocab_size": size,
            "original_lm_head": True,
            "torch_dtype": "bfloat16",
        }
