"""Results of a step that a device may still be computing. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from outrider.engine.arrays import Array, Arrays

Result = TypeVar("Result")


class Pending(NamedTuple, Generic[Result]):
    """A result that a device may still be computing. `finish` makes the result from the arrays' values on the host."""

    arrays: tuple[Array, ...]  # all numpy arrays or all tensors, on a GPU int64 or float64; may be empty
    finish: Callable[[Arrays], Result]  # takes the values of the arrays, in the same shapes


def read(*pending: Pending[Any]) -> list[Any]:
    """Returns the results, in order. A GPU's values come in one transfer, for which the host waits."""
    arrays = [array for each in pending for array in each.arrays]
    if not all(isinstance(array, np.ndarray) for array in arrays):
        from outrider.engine.transfer import download_all

        arrays = download_all(arrays)
    numbers = iter(arrays)
    return [each.finish([next(numbers) for _ in each.arrays]) for each in pending]
