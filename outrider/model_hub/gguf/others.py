"""GGUF models of architectures that only transformers itself reads. The functions import torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import ModelError


def write_dequantised(file: Path, architecture: str, dtype: str, directory: Path) -> None:
    """Writes config.json and the dequantised weights as safetensors. `dtype`: that of the weights.

    Raises: ModelError if transformers does not read the architecture, or if the file lacks weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # architectures may raise anything
        raise ModelError(
            f"{file} is of architecture {architecture}, which is not supported, and transformers cannot read it either "
            f"({type(error).__name__}: {error}): give the model's own directory or hub id"
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers initialises them
        raise ModelError(f"{file} has no weights for {len(missing)} tensors of the model, such as {missing[0]}")
    model.hf_quantizer = None  # the weights that were loaded are plain
    del model.config.quantization_config
    model.save_pretrained(directory)
