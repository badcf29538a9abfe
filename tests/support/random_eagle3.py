"""A random EAGLE-3 head of any shape, and the part of its target that it needs, written as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_random_eagle3(
    path: Path,
    *,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    draft_vocab_size: int = 160,
    model_type: str = "llama",
    has_biases: bool = False,
    **flags: Any,
) -> tuple[Path, Path]:
    """Writes `path`/head and `path`/target and returns both. `flags` go into speculators' configuration."""
    import torch
    from safetensors.torch import save_file

    from tests.support.head_files import Maker

    shape = {
        "model_type": model_type,
        "hidden_size": (hidden_size := 64),
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": (vocab_size := 320),
        "max_position_embeddings": 512,
    }
    make, attention = Maker(8, deviation=0.3), "layers.0.self_attn."
    make.layer("layers.0.", shape, width=2 * hidden_size)
    if has_biases:
        for name, heads in (("q", 4), ("k", num_kv_heads), ("v", num_kv_heads)):
            make.vector(f"{attention}{name}_proj.bias", heads * head_dim, mean=0.0)
    if model_type == "qwen3":
        for name in ("q_norm", "k_norm"):
            make.vector(f"{attention}{name}.weight", head_dim)
    for name in ("layers.0.hidden_norm", "norm"):
        make.vector(f"{name}.weight", hidden_size)
    make.matrix("fc", hidden_size, 3 * hidden_size)
    make.matrix("embed_tokens", vocab_size, hidden_size, gain=hidden_size**0.5)
    make.matrix("lm_head", draft_vocab_size, hidden_size, gain=4.0)
    if draft_vocab_size < vocab_size:
        make.tensors["d2t"] = make.ids(vocab_size, draft_vocab_size) - torch.arange(draft_vocab_size)
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": draft_vocab_size, **flags}
    configs = {"head": config | {"transformer_layer_config": shape}, "target": shape | {"num_hidden_layers": 8}}
    for name, content in configs.items():
        (path / name).mkdir(parents=True)
        (path / name / "config.json").write_text(json.dumps(content))
    save_file(make.tensors, path / "head" / "model.safetensors")
    save_file({"unused": torch.zeros(1)}, path / "target" / "model.safetensors")
    return path / "head", path / "target"
