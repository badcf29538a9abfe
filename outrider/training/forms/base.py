"""The interface between a head in training, its training loop and the replay of its drafts."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from outrider.heads.checkpoint import Target
from outrider.training.plan import write_atomically


class DraftVocabulary(nn.Module):
    """The target's tokens that a head can draft, and what the target says of them. None of it is trained or saved."""

    def __init__(self, counts: Tensor, size: int, target: Target, dtype: torch.dtype) -> None:
        """Of counts [vocab_size] of the target's tokens, the `size` most frequent. Raises: ModelError."""
        super().__init__()
        ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        places = torch.full((len(counts),), -1).index_copy_(0, ids, torch.arange(len(ids)))
        self.target_ids = nn.Buffer(ids, persistent=False)  # [draft_vocab_size] int64, rising
        self.draft_ids = nn.Buffer(places, persistent=False)  # [vocab_size] int64: where an id is among those, or -1
        self.embedding = nn.Buffer(target.embedding().to(dtype), persistent=False)  # [vocab_size, hidden_size]
        self.output_rows = nn.Buffer(target.output_layer()[ids].to(dtype), persistent=False)  # of the target's; of ids

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
    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of each step, for all query heads


class Student(nn.Module, ABC):
    """A head in training. Its parameters are those that are exported."""

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
        """As the published layout names them; ids among them."""

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """config.json of the published layout."""

    def export(self, folder: Path) -> None:
        """Writes model.safetensors, then config.json, whose change says that the folder is whole. Raises: OSError."""
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None).contiguous()
            for name, tensor in self.tensors().items()
        }
        write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_atomically(folder / "config.json", json.dumps(dict(self.config()), indent=2) + "\n")


def linear(width: int, out: int, gain: float = 1.0) -> nn.Linear:
    """Without a bias, whose outputs are `gain` times as large as its inputs."""
    found = nn.Linear(width, out, bias=False)
    nn.init.normal_(found.weight, std=gain * width**-0.5)
    return found


def output_layer(vocabulary: DraftVocabulary) -> nn.Linear:
    """Begins as the target's."""
    size, width = vocabulary.output_rows.shape
    found = nn.Linear(width, size, bias=False)
    found.weight.data.copy_(vocabulary.output_rows)
    return found
