"""One code path for numpy arrays (native kernels) and torch tensors (everything else). Torch-free.

The code uses the Python array API, which numpy implements itself and torch implements through array-api-compat. It
also uses three extensions that both libraries have: `view` with another dtype, operators with Python numbers, and item
assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
"""A numpy array or a torch tensor. A function's array arguments must be of one kind and on one device."""
Arrays: TypeAlias = "list[npt.NDArray[Any]]"

CHUNK_VALUES = 1 << 17
"""Number of values that a CPU processes at a time, so that intermediate results fit its cache."""

without_warnings = np.errstate(all="ignore")
"""Decorator for functions whose logits may be infinite or NaN. numpy would warn about such values; torch does not."""


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to the nearest bfloat16, ties to even. numpy has no such type, so the result holds the bits as uint16."""
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Converts bfloat16 bits to float32, exactly."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def namespace(array: Array) -> Any:
    """Returns the array API namespace of the array's library."""
    if isinstance(array, np.ndarray):
        return np
    from array_api_compat import torch

    return torch


def to_array_like(values: npt.NDArray[Any], array: Array) -> Array:
    """Returns the values as an array of the same kind and on the same device as `array`. Does not wait for a device."""
    if isinstance(array, np.ndarray):
        return values
    from outrider.engine.transfer import upload

    return upload(values, array.device)


def ids_like(values: Sequence[int], array: Array) -> Array:
    """Returns the ids as int64 [len(values)], of the same kind and on the same device as `array`."""
    return to_array_like(np.asarray(values, dtype=np.int64), array)


def largest_keys(keys: Array, number: int) -> Array:
    """Returns the `number` largest keys of each row, in descending order: [num_rows, n] int64 -> [num_rows, number]."""
    if not isinstance(keys, np.ndarray):
        return keys.topk(number, dim=1).values
    start = keys.shape[1] - number
    if 0 < start < keys.shape[1]:
        keys = np.partition(keys, start, axis=1)
    return np.flip(np.sort(keys[:, start:], axis=1), axis=1)


def map_row_chunks(function: Callable[..., Array], values: Array, *others: Any) -> Array:
    """Returns function(values, *others), computed for a few rows at a time on a CPU, otherwise for all rows at once.

    Args:
        function: maps arrays to one array; a row of the result depends on the same row of the arguments only.
        values: [num_rows, n], at least one row.
        others: further arguments with one entry per row, each of length num_rows.
    """
    num_rows = len(values)
    chunk = max(1, CHUNK_VALUES // values.shape[1]) if str(values.device) == "cpu" else num_rows
    if num_rows <= chunk:
        return function(values, *others)
    chunks = [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
    return namespace(values).concat([function(*(each[rows] for each in (values, *others))) for rows in chunks])
