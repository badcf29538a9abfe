"""Adapters (LoRA) as the engine sees them. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The part of an adapter in a linear layer: y = W x + up (down x)."""

    down: Floats  # [rank, in_features]
    up: Floats  # [out_features, rank], multiplied by the adapter's scaling


LowRanks = Mapping[str, LowRank]
"""The parts of an adapter by transformers' names of the layers, for example "model.layers.3.self_attn.q_proj"."""


class PackedAdapter(ABC):
    """An adapter in the form that a runner computes with. Sequences keep it alive while they run."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the model's device that it takes."""
