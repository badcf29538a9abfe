"""Attention over the paged KV cache: one interface, with a backend for each kind of machine."""

from __future__ import annotations

import importlib.util

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.gpu_kernels import why_no_triton
from outrider.errors import ConfigError

__all__ = ["AttentionBackend", "AttentionOptions", "make_attention_backend"]


FLASH_ATTN_DTYPES = ("float16", "bfloat16")
NO_LATENTS = "does not compute latent attention"


def make_attention_backend(
    name: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    *,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    latent_dim: int = 0,
) -> AttentionBackend:
    """Makes a backend. Raises: ConfigError if there is none of this name, or if it cannot run here.

    Args:
        name: "torch_sdpa", "triton", "varlen_attn" (FlashAttention in torch), "flash_attn" (FlashAttention in the
            flash-attn package) or "auto", which is the first of varlen_attn, triton and torch_sdpa that can run. The
            two FlashAttention backends compute prompts only; other steps use triton.
        device: the model's device.
        dtype: dtype of queries, keys and values.
        num_heads: number of query heads. Only triton needs it.
        num_kv_heads: number of key and value heads. Only triton needs it.
        latent_dim: as in ModelSpec. Only torch_sdpa computes latent attention.
    """
    reasons = {
        "varlen_attn": _why_no_flash_attention(device, dtype),
        "triton": why_no_triton(device),
        "torch_sdpa": "",
        "flash_attn": _why_no_flash_attention(device, dtype, package="flash_attn"),
    }
    if latent_dim:
        reasons = {each: reason or NO_LATENTS * (each != "torch_sdpa") for each, reason in reasons.items()}
    if name == "auto":
        name = next(each for each, reason in reasons.items() if not reason)
    if name not in reasons:
        raise ConfigError(f"model.attention {name!r} is not one of auto, {', '.join(reasons)}")
    if reasons[name]:
        raise ConfigError(f"model.attention {name} {reasons[name]}: use auto or torch_sdpa")
    if name == "torch_sdpa":
        from outrider.engine.attention.torch_sdpa import TorchSdpaAttention

        return TorchSdpaAttention(device)
    from outrider.engine.attention.triton_paged import TritonAttention

    triton = TritonAttention(device, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if name == "triton":
        return triton
    from outrider.engine.attention.flash_attn import FlashAttention

    return FlashAttention(name, device, triton)


def _why_no_flash_attention(device: str, dtype: str, package: str = "torch") -> str:
    """Returns why FlashAttention cannot run, or an empty string. It needs a GPU that our Triton kernels support."""
    if reason := why_no_triton(device):
        return reason
    if dtype not in FLASH_ATTN_DTYPES:
        return f"computes only in {' and '.join(FLASH_ATTN_DTYPES)}, but model.dtype is {dtype}"
    if importlib.util.find_spec(package) is None:
        return "needs the flash-attn package (pip install --no-build-isolation flash-attn, after torch)"
    return ""
