"""The order of a row's tokens, by falling value and among equals by rising id, as integers: no two are equal."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_HALF = 0xFFFFFFFF

LOWEST_KEY = torch.iinfo(torch.int64).min
"""Below the key of every token."""


def order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """A key of each token, the first token's the largest: float32, int64 -> int64, broadcast together."""
    return lowest_keys(values) | (_LOW_HALF - ids)


def lowest_keys(values: Tensor) -> Tensor:
    """The lowest key that a token of each value could have: float32 -> int64, same shape."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32


def ids_of_keys(keys: Tensor) -> Tensor:
    """The token of each key: int64, same shape."""
    return _LOW_HALF - (keys & _LOW_HALF)


def first_of_largest(values: Tensor) -> Tensor:
    """Argmax of each row with ties to the lowest id, which torch.argmax does not promise on every device.

    [num_rows, num_ids] -> [num_rows] int64; the first NaN where there is one.
    """
    is_largest = (values == values.amax(dim=1, keepdim=True)) | values.isnan()
    ids = torch.arange(values.shape[1], device=values.device)
    return torch.where(is_largest, ids, values.shape[1]).amin(dim=1)
