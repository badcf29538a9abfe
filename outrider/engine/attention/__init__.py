"""Attention over the paged KV cache: one interface, a backend for each kind of machine."""

from __future__ import annotations

import importlib.util

import torch

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.errors import ConfigError

__all__ = ["AttentionBackend", "AttentionOptions", "make_attention_backend"]


def make_attention_backend(name: str = "auto", device: torch.device | str = "cpu") -> AttentionBackend:
    """A new backend; "auto" is flash_attn on a GPU that has it, else torch_sdpa. Raises ConfigError if impossible."""
    device = torch.device(device)
    has_flash_attn = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        name = "flash_attn" if has_flash_attn else "torch_sdpa"
    if name == "torch_sdpa":
        from outrider.engine.attention.torch_sdpa import TorchSdpaAttention

        return TorchSdpaAttention(device)
    if name == "flash_attn":
        if not has_flash_attn:
            raise ConfigError(
                f"model.attention flash_attn needs a CUDA device and the flash-attn package (pip install "
                f"--no-build-isolation flash-attn, once torch is there); the device is {device}: use auto or torch_sdpa"
            )
        from outrider.engine.attention.flash_attn import FlashAttention

        return FlashAttention(device=device)
    raise ConfigError(f"model.attention {name!r} is not one of auto, torch_sdpa, flash_attn")
