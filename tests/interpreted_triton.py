"""Our Triton kernels on a CPU, by triton's interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined: before any of ours is imported


def interpreted_attention(**options):
    from outrider.engine.attention.triton_paged import TritonAttention

    return TritonAttention("cpu", **options)
