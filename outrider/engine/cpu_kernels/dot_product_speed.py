"""Whether dot product instructions are worth using on this processor, by measuring. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from ctypes import addressof, byref, create_string_buffer
from pathlib import Path
from statistics import median
from timeit import timeit

from outrider.engine.cpu_kernels.library import ElementType, KernelLibrary, MatrixStruct, Team, Workspace

NUM_ROWS, NUM_FEATURES = 48, 256  # all in the cache of one core: what memory does is no matter
TURNS = 51
CLEARLY = 1.25  # multiply-adds of bfloat16 take a tenth more than those of float32: weights are widened first
FASTER, SLOWER = "faster", "slower"


def multiply_adds_are_faster(file: Path, processor: str) -> bool:
    """Whether this library multiplies float32, by multiply-adds, in clearly less time than as much bfloat16.

    An instruction of AVX512-BF16 does the work of two multiply-adds as wide. Of a thread's, some processors start two
    in a cycle, others one in two cycles, in which they do four multiply-adds. Takes five milliseconds, once: the answer
    is kept beside the library where that can be written, so that every start chooses alike.

    Args:
        file: the library.
        processor: its name, by which the answer is kept; an image may be measured on one and start on another.
    """
    kept = file.with_name(f"multiply-adds-{processor}")
    with contextlib.suppress(OSError):
        if (answer := kept.read_text(encoding="utf-8")) in (FASTER, SLOWER):
            return answer == FASTER
    is_faster = _dot_product_ratio(KernelLibrary(file)) > CLEARLY
    with contextlib.suppress(OSError):  # a folder that this user may only read
        kept.write_text(FASTER if is_faster else SLOWER, encoding="utf-8")
    return is_faster


def _dot_product_ratio(library: KernelLibrary) -> float:
    """The time of a product in bfloat16 over that in float32, in turns, so that other work slows both."""
    dot_products, multiply_adds = (_product(library, dtype) for dtype in (ElementType.BFLOAT16, ElementType.FLOAT32))
    return median(timeit(dot_products, number=1) / timeit(multiply_adds, number=1) for _ in range(TURNS))


def _product(library: KernelLibrary, dtype: ElementType) -> Callable[[], object]:
    """Computes one product of zeros, in one thread."""
    team, workspace = Team(library, 1), Workspace(library)
    packed = create_string_buffer(library.functions.outrider_packed_size(dtype, NUM_FEATURES, NUM_FEATURES))
    matrix = MatrixStruct(addressof(packed), None, None, NUM_FEATURES, NUM_FEATURES, dtype)
    x, y = (create_string_buffer(NUM_ROWS * NUM_FEATURES * 4) for _ in range(2))

    def multiply(_held: object = packed) -> None:  # `matrix` has its address only
        library.functions.outrider_linear(team.handle, workspace.handle, dtype, x, NUM_ROWS, byref(matrix), y)

    return multiply
