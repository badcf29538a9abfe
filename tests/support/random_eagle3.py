"""A random EAGLE-3 head of any shape, and what it needs of its target, written as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_random_eagle3(
    path: Path,
    *,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    vocab_size: int = 320,
    draft_vocab_size: int = 160,
    max_model_len: int = 512,
    model_type: str = "llama",
    has_biases: bool = False,
    **flags: Any,
) -> tuple[Path, Path]:
    """Writes `path`/head and `path`/target and returns both. `flags`: of speculators' configuration."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / shape[-1] ** 0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=random)

    heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
    sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    attention = {f"self_attn.{name}.weight": weight(size, 2 * hidden_size) for name, size in sizes.items()}
    if has_biases:
        attention |= {f"self_attn.{name}.bias": weight(size) for name, size in sizes.items()}
    if model_type == "qwen3":
        attention |= {f"self_attn.{name}.weight": norm(head_dim) for name in ("q_norm", "k_norm")}
    layer = {
        **attention,
        "self_attn.o_proj.weight": weight(hidden_size, heads),
        "mlp.gate_proj.weight": weight(intermediate_size, hidden_size),
        "mlp.up_proj.weight": weight(intermediate_size, hidden_size),
        "mlp.down_proj.weight": weight(hidden_size, intermediate_size),
        **{name: norm(hidden_size) for name in NORMS},
    }
    has_own_ids = draft_vocab_size < vocab_size
    target_ids = torch.randperm(vocab_size, generator=random)[:draft_vocab_size].sort().values
    tensors = {
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
        "fc.weight": weight(hidden_size, 3 * hidden_size),
        "norm.weight": norm(hidden_size),
        "embed_tokens.weight": weight(vocab_size, hidden_size) * hidden_size**0.5,
        "lm_head.weight": 4 * weight(draft_vocab_size, hidden_size),
        **({"d2t": target_ids - torch.arange(draft_vocab_size)} if has_own_ids else {}),
    }
    own_config = {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
    }
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": draft_vocab_size, **flags}
    target_config = {**own_config, "num_hidden_layers": 8}
    for name, content in (("head", config | {"transformer_layer_config": own_config}), ("target", target_config)):
        (path / name).mkdir(parents=True)
        (path / name / "config.json").write_text(json.dumps(content))
    save_file(tensors, path / "head" / "model.safetensors")
    save_file({"unused": torch.zeros(1)}, path / "target" / "model.safetensors")
    return path / "head", path / "target"


NORMS = ("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight")
