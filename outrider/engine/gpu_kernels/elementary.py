"""Logarithms, masses and order keys of tokens, as in `outrider.engine.sampler.elementary` and `order`.

These functions use the same float32 operations in the same order, each rounded separately, so the bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.sampler import elementary

_SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
_LOG2_HIGH = tl.constexpr(elementary.LOG2_HIGH)
_LOG2_LOW = tl.constexpr(elementary.LOG2_LOW)
_LOG2_E = tl.constexpr(elementary.LOG2_E)
_LOG_POLYNOMIAL = tl.constexpr(elementary.LOG_POLYNOMIAL)
_EXP_POLYNOMIAL = tl.constexpr(elementary.EXP_POLYNOMIAL)
_MASS_BIAS = tl.constexpr(127 + elementary.MASS_EXPONENT)
MIN_LOG_WEIGHT = tl.constexpr(elementary.MIN_LOG_WEIGHT)
_WHOLE = tl.constexpr(2.0**23)
"""The smallest number at and above which every float32 is an integer."""


@triton.jit
def logarithm(values, rests):
    """Returns log(value + rest)."""
    bits = values.to(tl.int32, bitcast=True)
    exponents = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponents << 23)).to(tl.float32, bitcast=True) - 1.0
    f += rests * ((127 - exponents) << 23).to(tl.float32, bitcast=True)
    polynomial = f * _LOG_POLYNOMIAL[0] + _LOG_POLYNOMIAL[1]
    for power in tl.static_range(2, 9):
        polynomial = polynomial * f + _LOG_POLYNOMIAL[power]
    powers = exponents.to(tl.float32)
    squares = f * f
    result = f * squares * polynomial
    result += powers * _LOG2_LOW
    result -= squares * 0.5
    result += f
    result += powers * _LOG2_HIGH
    return result


@triton.jit
def round_to_even(values):
    """Rounds values >= 0 to integers. After 2^23 is added, a float32 has no bits left for a fraction."""
    return tl.where(values < _WHOLE, (values + _WHOLE) - _WHOLE, values)


@triton.jit
def masses_of(values, largest):
    """Returns e^(value - largest) in steps of 2^-44, int64. `largest` may be infinite but not NaN."""
    x = values - largest
    is_infinite = tl.abs(largest) == float("inf")
    x = tl.where(is_infinite, tl.where(values == largest, 0.0, MIN_LOG_WEIGHT), x)
    x = tl.maximum(x, MIN_LOG_WEIGHT)
    exponents = -round_to_even(-(x * _LOG2_E))
    x -= exponents * _LOG2_HIGH
    x -= exponents * _LOG2_LOW
    weights = x * _EXP_POLYNOMIAL[0] + _EXP_POLYNOMIAL[1]
    for power in tl.static_range(2, 6):
        weights = weights * x + _EXP_POLYNOMIAL[power]
    weights *= x * x
    weights += x
    weights += 1.0
    weights *= ((exponents.to(tl.int32) + _MASS_BIAS) << 23).to(tl.float32, bitcast=True)
    return round_to_even(weights).to(tl.int64)


@triton.jit
def order_of(values):
    """Returns the high half of a token's order key: int32, increasing with the token's value."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """Returns the value that has this order (the inverse of `order_of`)."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_keys(order, ids):
    """Returns int64 order keys; among equal values a lower id has the larger key."""
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
