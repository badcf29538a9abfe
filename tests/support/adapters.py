"""Random adapters (LoRA) in PEFT's format, and models into which they are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    path: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    scale: float = 0.5,
) -> Path:
    """Writes a random adapter for the checkpoint `model` to `path`, and returns it. Neither A nor B is zero.

    `config` goes into adapter_config.json.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            out_features, in_features = weight.shape
            for part, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                values = scale * torch.randn(shape, generator=generator) / in_features**0.25
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.to(getattr(torch, dtype))
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        **(config or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(about))
    return path


def merge_adapter(model: Any, adapter: Path, *, scaling: float = 2.0) -> Any:
    """Adds the adapter's products to the weights of a transformers model, and returns the model."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
                up = tensors[name.replace("lora_A", "lora_B")]
                module.weight += scaling * (up.float() @ down.float()).to(module.weight.dtype)
    return model
