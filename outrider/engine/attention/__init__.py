"""Attention over the paged KV cache: one interface, a backend for each kind of machine."""

from __future__ import annotations

import importlib.util

import torch

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.gpu_kernels import why_no_triton
from outrider.errors import ConfigError

__all__ = ["AttentionBackend", "AttentionOptions", "make_attention_backend"]


FLASH_ATTN_DTYPES = ("float16", "bfloat16")


def make_attention_backend(
    name: str = "auto", device: torch.device | str = "cpu", dtype: str = "float32"
) -> AttentionBackend:
    """A new backend. Raises ConfigError if impossible.

    Args:
        name: "torch_sdpa", "triton", "flash_attn", or "auto": the first of flash_attn, triton and torch_sdpa that can
            compute.
        device: of the model.
        dtype: of queries, keys and values.
    """
    device = torch.device(device)
    if name == "auto":
        name = "torch_sdpa" if why_no_triton(device) else "triton"
        name = name if _why_no_flash_attn(device, dtype) else "flash_attn"
    if name == "torch_sdpa":
        from outrider.engine.attention.torch_sdpa import TorchSdpaAttention

        return TorchSdpaAttention(device)
    if name == "flash_attn":
        if reason := _why_no_flash_attn(device, dtype):
            raise ConfigError(f"model.attention flash_attn {reason}: use auto or torch_sdpa")
        from outrider.engine.attention.flash_attn import FlashAttention

        return FlashAttention(device=device)
    if name == "triton":
        if reason := why_no_triton(device):
            raise ConfigError(f"model.attention triton {reason}: use auto or torch_sdpa")
        from outrider.engine.attention.triton_paged import TritonAttention

        return TritonAttention(device)
    raise ConfigError(f"model.attention {name!r} is not one of auto, torch_sdpa, triton, flash_attn")


def _why_no_flash_attn(device: torch.device, dtype: str) -> str:
    """Empty where it can compute."""
    if device.type != "cuda":
        return f"needs a CUDA device, and the device is {device}"
    if dtype not in FLASH_ATTN_DTYPES:
        return f"computes in {' and '.join(FLASH_ATTN_DTYPES)}, and model.dtype is {dtype}"
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the flash-attn package (pip install --no-build-isolation flash-attn, once torch is there)"
    return ""
