"""The interface between a head in training, its training loop and the replay of its drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.checkpoint import Target


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The target's tokens that a head can draft, and what the target says of them. None of it is trained."""

    target_ids: Tensor  # [draft_vocab_size] int64, rising
    draft_ids: Tensor  # [vocab_size] int64: where each of the target's ids is among those, or -1
    embedding: Tensor  # [vocab_size, hidden_size]: the target's
    output_rows: Tensor  # [draft_vocab_size, hidden_size]: of the target's output layer

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, target: Target, dtype: torch.dtype) -> DraftVocabulary:
        """Of counts [vocab_size] of the target's tokens, the `size` most frequent. Raises: ModelError."""
        target_ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        draft_ids = torch.full((len(counts),), -1)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        rows = target.output_layer()[target_ids].to(dtype)
        return cls(target_ids, draft_ids, target.embedding().to(dtype), rows)

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(*(getattr(self, name).to(device) for name in self.__slots__))

    @property
    def is_whole(self) -> bool:
        return len(self.target_ids) == len(self.draft_ids)


@dataclass(slots=True, eq=False)
class Chains:
    """All drafts of a batch of texts, as far as they are: chain t of a text begins with its token t + 1 and feature t.

    That is row t of outrider.heads.base.HeadRows at depth 0, and depth j after j steps of its own outputs.
    """

    hidden: Tensor  # [num_texts, num_chains, width]: what the next step is fed beside tokens
    first: int = 0  # chains before it make one step only, for others to see
    depth: int = 0
    keys_values: list[tuple[Tensor, Tensor]] | None = None  # of each step


class Student(nn.Module, ABC):
    """A head in training. Its parameters are those that are exported, under any names."""

    vocabulary: DraftVocabulary

    @abstractmethod
    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        """Features [num_texts, num_tokens, num_taps * hidden_size]: see `taps`."""

    @abstractmethod
    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        """One draft token further: [num_texts, num_chains] int64 → own hidden states [num_texts, num_chains, width].

        The first step takes and gives all chains but gives those from `first` on; later ones take those alone.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[n, width] of that step → [n, draft_vocab_size]."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """As the published layout names them, on the CPU; ids among them."""

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """config.json of the published layout."""
