"""Our Triton kernels on a CPU, in triton's interpreter, which conftest.py selects if there is no GPU."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np


def skip_unread_work():
    """Spares triton's interpreter work whose results nobody reads. That work takes more than half of the time.

    It computes each 32-bit sum and product again in 64 bits, for an assertion that runs in triton's debug mode only.
    And it patches triton's language anew for every device function that a running kernel calls, although the first
    call of a function from the same module has already patched it.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the assertions run"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()  # the globals of the modules whose language the running kernel has patched

    def patch_once(function):
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_afresh(executor, *args, **kwargs):
        patched.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def multiply_in_fixed_order(monkeypatch):
    """Makes the bits of a row of a product independent of the row's place in a tile.

    The interpreter multiplies by BLAS, which does not have this property on every machine.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def dot(_builder, a, b, sums, *_precision):
        product = np.einsum("ij,jk->ik", a.data, b.data, dtype=sums.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def interpreted_attention(*, num_programs=3, **options):
    """Returns the attention of a GPU that runs few programs at a time, each of which therefore has a list of tiles."""
    from outrider.engine.attention.triton_paged import TritonAttention

    return TritonAttention("cpu", num_programs=num_programs, **options)
