"""Checkpoints that this project reads itself, tensor by tensor, instead of transformers. Torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.device import device_type
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.fingerprint import GGUF_TABLE
from outrider.model_hub.gguf.blocks import FORMATS
from outrider.model_hub.gguf.directory import open_directory
from outrider.model_hub.lazy_tensors import Tensors
from outrider.model_hub.quantised.methods import choose_scheme, method_of, quantization_of
from outrider.model_hub.quantised.open import open_safetensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's tensors. Each is read when it is used."""

    tensors: Tensors
    format: str  # for users, such as "GGUF Q5_0, Q4_K, Q8_0" or "awq, 4 bits"
    is_quantised: bool  # whether any tensor is a GroupedWeight
    is_plain: bool  # whether the checkpoint is not quantised in any way


def open_checkpoint(directory: Path, device: str) -> Checkpoint | None:
    """Opens a GGUF model, or on a CPU a quantised checkpoint. Returns None if transformers must read the weights.

    Raises: ModelError if weights are missing, have changed since the directory was made, or are quantised in an
    unsupported way.
    """
    if (directory / GGUF_TABLE).is_file():
        tensors, entries = open_directory(directory)
        formats = Counter(entry.type_name for entry in entries if len(entry.shape) > 1).most_common()
        is_quantised = any(entry.type in FORMATS for entry in entries)
        name = f"GGUF {', '.join(name for name, _ in formats)}"
        return Checkpoint(tensors, name, is_quantised, is_plain=not is_quantised)
    quantization = quantization_of(read_json(directory / "config.json"))
    if not quantization or device_type(device) != "cpu":
        return None
    bits = choose_scheme(quantization).bits
    name = method_of(quantization) + (f", {bits} bits" if bits else "")
    return Checkpoint(open_safetensors(directory), name, is_quantised=bits > 0, is_plain=False)
