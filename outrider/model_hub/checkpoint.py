"""Checkpoints that this project reads itself, tensor by tensor, instead of transformers: GGUF models. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.model_hub.fingerprint import GGUF_TABLE
from outrider.model_hub.gguf.directory import open_directory
from outrider.model_hub.quantised.open import Tensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's tensors. Each is read when it is used."""

    tensors: Tensors
    format: str  # for users, such as "GGUF Q5_0, Q4_K, Q8_0"
    is_quantised: bool  # whether any tensor is a GroupedWeight


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """Opens a model's directory, or returns None if transformers reads its weights.

    Raises: ModelError if weights are missing or have changed since the directory was made.
    """
    if (directory / GGUF_TABLE).is_file():
        tensors = open_directory(directory).tensors
        return Checkpoint(tensors, f"GGUF {', '.join(tensors.formats)}", tensors.is_quantised)
    return None
