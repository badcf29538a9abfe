"""Our own Triton kernels for GPUs. Importing a module here imports triton, which comes with torch for CUDA.

With TRITON_INTERPRET=1, set before the import, the kernels run on a CPU: slowly, and in float32 and float16 only.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability for our kernels, which are compiled and checked for 8.0, 9.0 and 10.0."""

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
"""Model types in config.json that outrider.engine.fused_decoder supports."""


def why_no_triton(device: torch.device | str) -> str:
    """Returns why our Triton kernels cannot compute, or an empty string. Does not import torch for a CPU."""
    if not str(device).startswith("cuda"):
        return f"needs a CUDA device, and the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package, which comes with torch for CUDA"
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"needs compute capability {'.'.join(map(str, MIN_CAPABILITY))}, for bfloat16 products"
    return ""


def why_not_fused(config: PretrainedConfig) -> str:
    """Returns why a model of this configuration cannot have a fused decoder, or an empty string."""
    if config.model_type not in FUSED_MODEL_TYPES:
        return f"{config.model_type} is not one of {', '.join(sorted(FUSED_MODEL_TYPES))}"
    if (activation := activation_of(config)) not in ("silu", "gelu_pytorch_tanh"):
        return f"its activation is {activation}"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "it caps its logits"
    return "it is quantized" if getattr(config, "quantization_config", None) else ""


def activation_of(config: PretrainedConfig) -> str:
    """Returns transformers' name of the activation."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))
