"""The order of a row's tokens, by descending value and then ascending id, expressed by distinct integer keys."""

from __future__ import annotations

from outrider.engine.arrays import Array, namespace

_LOW_HALF = 0xFFFFFFFF

LOWEST_KEY = -(1 << 63)
"""A key below that of every token."""


def order_keys(values: Array) -> Array:
    """Returns a sort key for each token, larger for tokens that come earlier in the order.

    [num_rows, num_ids] float32 -> int64, same shape.
    """
    keys = lowest_keys(values)
    keys |= _LOW_HALF - namespace(values).arange(values.shape[1], device=values.device)
    return keys


def lowest_keys(values: Array) -> Array:
    """Returns the lowest key that a token of each value could have: float32 -> int64, same shape."""
    xp = namespace(values)
    bits = (values + 0.0).view(xp.int32)  # turns -0.0 into 0.0: equal values need equal keys
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = xp.astype(bits, xp.int64)
    keys <<= 32
    return keys


def values_of_keys(keys: Array) -> Array:
    """Returns the value of each key's token: int64 -> float32, same shape."""
    xp = namespace(keys)
    bits = xp.astype(keys >> 32, xp.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.view(xp.float32)


def ids_of_keys(keys: Array) -> Array:
    """Returns the token id of each key: int64, same shape."""
    return _LOW_HALF - (keys & _LOW_HALF)


def first_argmax(values: Array) -> Array:
    """Returns each row's argmax; a tie gives the lowest id. The array API's argmax does not guarantee the lowest.

    [num_rows, num_ids] -> [num_rows] int64; the index of the first NaN if there is one.
    """
    xp = namespace(values)
    is_largest = (values == xp.max(values, axis=1, keepdims=True)) | xp.isnan(values)
    ids = xp.arange(values.shape[1], device=values.device)
    return xp.min(xp.where(is_largest, ids, values.shape[1]), axis=1)
