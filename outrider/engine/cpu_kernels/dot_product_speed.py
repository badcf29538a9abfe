"""Whether dot product instructions are worth using on this processor, by measuring. Torch-free."""

from __future__ import annotations

from ctypes import addressof, byref, create_string_buffer
from functools import partial
from pathlib import Path
from timeit import repeat

from outrider.engine.cpu_kernels.library import ElementType, KernelLibrary, MatrixStruct, Team, Workspace

NUM_ROWS, NUM_FEATURES = 48, 256  # all in the cache of one core: what memory does is no matter
PASSES = 8
CLEARLY = 1.25  # multiply-adds of bfloat16 take a tenth more than those of float32: weights are widened first


def multiply_adds_are_faster(file: Path) -> bool:
    """Whether this library multiplies float32, by multiply-adds, in clearly less time than as much bfloat16.

    An instruction of AVX512-BF16 does the work of two multiply-adds as wide. Of a thread's, some processors start two
    in a cycle, others one in two cycles, in which they do four multiply-adds. Takes two milliseconds.
    """
    library = KernelLibrary(file)
    return _seconds(library, ElementType.BFLOAT16) > CLEARLY * _seconds(library, ElementType.FLOAT32)


def _seconds(library: KernelLibrary, dtype: ElementType) -> float:
    """The shortest time of one product of zeros, in one thread."""
    team, workspace = Team(library, 1), Workspace(library)
    packed = create_string_buffer(library.functions.outrider_packed_size(dtype, NUM_FEATURES, NUM_FEATURES))
    matrix = MatrixStruct(addressof(packed), None, None, NUM_FEATURES, NUM_FEATURES, dtype)
    x, y = (create_string_buffer(NUM_ROWS * NUM_FEATURES * 4) for _ in range(2))
    linear = library.functions.outrider_linear
    multiply = partial(linear, team.handle, workspace.handle, dtype, x, NUM_ROWS, byref(matrix), y)
    return min(repeat(multiply, number=1, repeat=PASSES))
