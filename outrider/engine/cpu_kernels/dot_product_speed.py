"""Measures whether dot product instructions are worth using on this processor. Torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from ctypes import addressof, byref, create_string_buffer
from pathlib import Path
from time import thread_time
from timeit import timeit

from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType, KernelLibrary, Workspace

NUM_ROWS, NUM_FEATURES = 48, 256  # small enough for one core's cache, so that memory speed does not matter
TURNS = 51
WIDENING = 1.1  # bfloat16 multiply-adds take a tenth longer than float32's, because weights are first widened


def are_multiply_adds_faster(file: Path, processor: str) -> bool:
    """Returns whether, for bfloat16, multiply-adds (which this library uses for float32) are faster than dot products.

    A dot product instruction (AVX512-BF16) does the work of two multiply-adds of equal width. Some processors start two
    such instructions per cycle and thread, others only one in two cycles, in which they could do four multiply-adds.
    Measuring takes ten milliseconds. A result measured on an idle processor is stored next to the library if possible,
    so that later starts make the same choice.

    Args:
        file: the library.
        processor: this processor's name. It is part of the result's file name, because a container image may start on
            another processor.
    """
    kept = file.with_name(f"multiply-adds-{processor}")
    try:
        ratio = float(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ratio = _dot_product_ratio(KernelLibrary(file))
        with contextlib.suppress(OSError):  # this user may not write to the folder
            if os.getloadavg()[0] < (os.cpu_count() or 1):
                kept.write_text(f"{ratio:.3f}\n", encoding="utf-8")
    return ratio > WIDENING


def _dot_product_ratio(library: KernelLibrary) -> float:
    """Returns the time of a bfloat16 product divided by that of a float32 product.

    Both are minima over alternating measurements of the thread's CPU time. If another program runs on a core that
    shares the multipliers, it slows multiply-adds more than dot products.
    """
    products = [_product(library, dtype) for dtype in (ElementType.BFLOAT16, ElementType.FLOAT32)]
    turns = [[timeit(product, timer=thread_time, number=1) for product in products] for _ in range(TURNS)]
    dot_products, multiply_adds = map(min, zip(*turns, strict=True))
    return dot_products / multiply_adds


def _product(library: KernelLibrary, dtype: ElementType) -> Callable[[], object]:
    """Returns a function that computes one product of zeros, in one thread."""
    kernels, workspace = CpuKernels(library, 1), Workspace(library)
    packed = create_string_buffer(library.functions.outrider_packed_size(dtype, NUM_FEATURES, NUM_FEATURES))
    matrix = structures.OutriderMatrix(addressof(packed), None, None, NUM_FEATURES, NUM_FEATURES, dtype, 0)
    x, y = (create_string_buffer(NUM_ROWS * NUM_FEATURES * 4) for _ in range(2))

    def multiply(_held: object = packed) -> None:  # keeps `packed` alive, because `matrix` has only its address
        library.functions.outrider_linear(kernels.team, workspace.handle, dtype, x, NUM_ROWS, byref(matrix), y)

    return multiply
