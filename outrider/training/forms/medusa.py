"""Medusa (Cai et al. 2024, arXiv 2401.10774) in training: one block for each token ahead, over one output layer.

Exported in vLLM's layout, with a truncated vocabulary and the output layer that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from outrider.training.forms.base import Chains, DraftVocabulary, Student, output_layer


class MedusaStudent(Student):
    """Begins as a target that repeats its own next token: blocks are zero."""

    def __init__(self, vocabulary: DraftVocabulary, num_heads: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        width = vocabulary.output_rows.shape[1]
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(width, width)])}) for _ in range(num_heads)
        )
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        self.lm_head = output_layer(vocabulary)

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        return Chains(features[:, first:])

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        return chains.hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        block: Any = self.blocks[depth]
        logits: Tensor = self.lm_head(hidden + functional.silu(block["layers"][0](hidden)))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        ids = {} if self.vocabulary.is_whole else {"token_map": self.vocabulary.target_ids}
        return {**dict(self.named_parameters()), **ids}

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
