"""Whether dot product instructions are worth using on this processor, by measuring. Torch-free."""

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

NUM_ROWS, NUM_FEATURES = 48, 256  # all in the cache of one core: what memory does is no matter
TURNS = 51
WIDENING = 1.1  # multiply-adds of bfloat16 take a tenth more than those of float32: weights are widened first


def multiply_adds_are_faster(file: Path, processor: str) -> bool:
    """Whether bfloat16 takes less time by multiply-adds, as this library multiplies float32, than by its dot products.

    An instruction of AVX512-BF16 does the work of two multiply-adds as wide. Of a thread's, some processors start two
    in a cycle, others one in two cycles, in which they do four multiply-adds. Takes ten milliseconds: what was measured
    while a processor was free is kept beside the library where that can be written, so that later starts choose alike.

    Args:
        file: the library.
        processor: its name, by which that is kept; an image may be measured on one and start on another.
    """
    kept = file.with_name(f"multiply-adds-{processor}")
    try:
        ratio = float(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ratio = _dot_product_ratio(KernelLibrary(file))
        with contextlib.suppress(OSError):  # a folder that this user may only read
            if os.getloadavg()[0] < (os.cpu_count() or 1):
                kept.write_text(f"{ratio:.3f}\n", encoding="utf-8")
    return ratio > WIDENING


def _dot_product_ratio(library: KernelLibrary) -> float:
    """The time of a product in bfloat16 over that in float32, in the thread's own time: the shortest of each, in turns.

    Another program on a core that shares its multipliers slows the type that keeps them busier, multiply-adds.
    """
    products = [_product(library, dtype) for dtype in (ElementType.BFLOAT16, ElementType.FLOAT32)]
    turns = [[timeit(product, timer=thread_time, number=1) for product in products] for _ in range(TURNS)]
    dot_products, multiply_adds = map(min, zip(*turns, strict=True))
    return dot_products / multiply_adds


def _product(library: KernelLibrary, dtype: ElementType) -> Callable[[], object]:
    """A function that computes one product of zeros, in one thread."""
    kernels, workspace = CpuKernels(library, 1), Workspace(library)
    packed = create_string_buffer(library.functions.outrider_packed_size(dtype, NUM_FEATURES, NUM_FEATURES))
    matrix = structures.OutriderMatrix(addressof(packed), None, None, NUM_FEATURES, NUM_FEATURES, dtype)
    x, y = (create_string_buffer(NUM_ROWS * NUM_FEATURES * 4) for _ in range(2))

    def multiply(_held: object = packed) -> None:  # `matrix` has its address only
        library.functions.outrider_linear(kernels.team, workspace.handle, dtype, x, NUM_ROWS, byref(matrix), y)

    return multiply
