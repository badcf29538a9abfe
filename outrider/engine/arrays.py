"""Arrays of numpy, where native kernels compute, and of torch everywhere else: one code for both. Torch-free.

That code is written in the Python array API, which numpy has by itself and torch by array-api-compat, and in what
both have besides: `view` of another dtype, operators with numbers, and assignment to places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
"""npt.NDArray[Any] or torch.Tensor, as the logits are. Functions that take several take all of one kind and device."""
Arrays: TypeAlias = "list[npt.NDArray[Any]]"

PIECE_VALUES = 1 << 17
"""Values of rows that a processor computes with at a time: what is made of them fits its cache."""

without_warnings = np.errstate(all="ignore")
"""Decorates what computes with logits that are infinite or no numbers: numpy would warn, torch does not."""


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest bfloat16, ties to even: numpy has no such type, so its words are uint16."""
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The same numbers."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def namespace(array: Array) -> Any:
    """The functions of the array's library, as the array API has them."""
    if isinstance(array, np.ndarray):
        return np
    from array_api_compat import torch

    return torch


def beside(values: npt.NDArray[Any], array: Array) -> Array:
    """The values where `array` is, as an array of its kind. Does not wait for a device."""
    if isinstance(array, np.ndarray):
        return values
    from outrider.engine.transfer import upload

    return upload(values, array.device)


def ids_beside(values: Sequence[int], array: Array) -> Array:
    """[len(values)] int64, as `beside`."""
    return beside(np.asarray(values, dtype=np.int64), array)


def largest_of(keys: Array, number: int) -> Array:
    """The largest of each row, falling: [num_rows, n] int64 -> [num_rows, number], with 0 <= number <= n."""
    if not isinstance(keys, np.ndarray):
        return keys.topk(number, dim=1).values
    start = keys.shape[1] - number
    if 0 < start < keys.shape[1]:
        keys = np.partition(keys, start, axis=1)
    return np.flip(np.sort(keys[:, start:], axis=1), axis=1)


def in_pieces(function: Callable[..., Array], values: Array, *others: Any) -> Array:
    """function(values, *others), by a few rows at a time on a processor, and on a device by all.

    Args:
        function: row by row, of arrays to one.
        values: [num_rows, n], at least one row.
        others: what belongs to each row, each of num_rows.
    """
    num_rows = len(values)
    most = max(1, PIECE_VALUES // values.shape[1]) if str(values.device) == "cpu" else num_rows
    if num_rows <= most:
        return function(values, *others)
    pieces = [slice(start, start + most) for start in range(0, num_rows, most)]
    return namespace(values).concat([function(*(each[piece] for each in (values, *others))) for piece in pieces])
