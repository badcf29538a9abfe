"""A tiny random drafter head, written as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path


def make_tiny_head(path: Path, *, hidden_size: int = 64, vocab_size: int = 320, num_heads: int = 2) -> Path:
    """Writes Medusa heads for `make_tiny_model`'s models to `path` and returns it. They read the last hidden state."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(hidden_size, hidden_size, generator=generator) / 8
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden_size)
        tensors[f"{head}.1.weight"] = torch.randn(vocab_size, hidden_size, generator=generator) / 8
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1}))
    return path
