"""flash_attn_varlen_func as flash-attn 2.8 publishes it, and torch's varlen_attn, computed by torch on any device.

Each refuses what the real kernels refuse, and reads only what those may read: the rows and keys within the given
lengths. They replace the kernels on machines without a GPU; their speed and rounding differ.
"""

from __future__ import annotations

import torch


def flash_attn_varlen_func(
    q,  # [total_q, num_heads, head_dim]
    k,  # [total_k, num_kv_heads, head_dim]
    v,
    cu_seqlens_q,  # [num_seqs + 1] int32
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    refuse(q.dtype not in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    refuse(not q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    refuse({q.device, k.device, v.device} != {q.device}, "tensors must be on the same device")
    refuse(cu_seqlens_q.dtype != torch.int32 or cu_seqlens_k.dtype != torch.int32, "cu_seqlens must have dtype int32")
    refuse(q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1, "Input tensor must have contiguous last dim")
    refuse(k.dim() != 3 or len(k) != cu_seqlens_k[-1], "k must have shape (total_k, num_heads_k, head_size)")
    refuse(q.shape[2] > 256, "FlashAttention forward only supports head dimension at most 256")
    refuse(q.shape[1] % k.shape[1] != 0, "Number of heads in key/value must divide number of heads in query")
    refuse(dropout_p != 0.0 or alibi_slopes is not None or block_table is not None, "not stood in for")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    output = torch.zeros_like(q)
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        rows, num_keys = slice(starts[i], starts[i + 1]), key_starts[i + 1] - key_starts[i]
        num_rows = rows.stop - rows.start
        refuse(num_rows > max_seqlen_q or num_keys > max_seqlen_k, "a sequence is longer than the longest")
        heads_per_kv = q.shape[1] // k.shape[1]
        keys, values = (
            packed[key_starts[i] : key_starts[i + 1]].repeat_interleave(heads_per_kv, dim=1).float()
            for packed in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        # Masks are aligned to the bottom right corner, so that row i is at key i + num_keys - num_rows.
        behind = torch.arange(num_keys - num_rows, num_keys)[:, None] - torch.arange(num_keys)[None]
        left, right = window_size[0], 0 if causal else window_size[1]
        is_hidden = torch.zeros_like(behind, dtype=torch.bool)
        if left >= 0:
            is_hidden |= behind > left
        if right >= 0:
            is_hidden |= behind < -right
        weights = scores.masked_fill(is_hidden.to(scores.device), -torch.inf).softmax(dim=2)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return output


def varlen_attn_of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    """varlen_attn of torch 2.11, where query heads share key-value heads without an argument for it."""
    refuse(query.shape[2] % 8 != 0, "head_size should be a multiple of 8")
    refuse(return_aux is not None, "not stood in for")
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    return flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=scale, window_size=window_size)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """varlen_attn of torch 2.13."""
    refuse(
        not enable_gqa and query.size(1) != key.size(1), "Expect query and key/value to have the same number of heads"
    )
    refuse(seqused_k is not None or block_table is not None or num_splits is not None, "not stood in for")
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    return varlen_attn_of_2_11(query, key, value, *lengths, scale=scale, window_size=window_size)


def refuse(condition, message):
    if condition:
        raise RuntimeError(message)
