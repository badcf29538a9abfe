"""Our Triton kernels on a CPU, by triton's interpreter, which conftest.py chooses where there is no GPU."""

from __future__ import annotations


def interpreted_attention(**options):
    from outrider.engine.attention.triton_paged import TritonAttention

    return TritonAttention("cpu", **options)
