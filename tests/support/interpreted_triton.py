"""Our Triton kernels on a CPU, by triton's interpreter, which conftest.py chooses where there is no GPU."""

from __future__ import annotations

import importlib

import numpy as np


def multiply_in_one_order(monkeypatch):
    """The interpreter's are the BLAS's: by some of its kernels a row's bits depend on its place in a tile."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def dot(_builder, a, b, sums, *_precision):
        product = np.einsum("ij,jk->ik", a.data, b.data, dtype=sums.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def interpreted_attention(*, num_programs=3, **options):
    """Of a GPU that runs few programs at a time, so that they go through lists."""
    from outrider.engine.attention.triton_paged import TritonAttention

    return TritonAttention("cpu", num_programs=num_programs, **options)
