"""Logarithm and exponential in which every step is one operation that IEEE 754 rounds.

The last bits of a library's logarithm or exponential depend on the processor. Those of float32 addition, subtraction
and multiplication do not, so these polynomials (of Cephes' logf and expf) give the same bits in numpy, in torch on any
device and in the native kernels (`cpu_kernels/source/elementary.h`). Races and filters are therefore decided alike
everywhere, including near ties. The polynomials are accurate to one unit in the last place.

Each line below must stay a separate numpy or torch operation. `torch.addcmul`, an `alpha` or a compiler that merges
lines would fuse a product with a sum, and change bits.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.engine.arrays import Array, namespace, without_warnings


def _float32(*values: float) -> tuple[float, ...]:
    """Rounds each value to the nearest float32, so that a device has nothing left to round."""
    return tuple(np.asarray(values, dtype=np.float32).tolist())


LOG_POLYNOMIAL = _float32(
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP_POLYNOMIAL = _float32(
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_HIGH, LOG2_LOW, LOG2_E = _float32(0.693359375, -2.12194440e-4, 1.44269504088896)  # the first two add up to log 2
SQRT_HALF_BITS = 0x3F3504F3
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
MASS_EXPONENT = 44
"""Logarithm to base 2 of the largest mass. A mass is an unnormalised probability as an integer (see `masses_of`)."""
MIN_LOG_WEIGHT = -32.0
"""Natural logarithm of a weight relative to the largest weight. At or below it, the mass of a weight rounds to 0."""

MASS_OF_LARGEST = 1 << MASS_EXPONENT
"""The mass of the largest value of a row."""


def logarithm(values: Array, rests: Array | None = None) -> Array:
    """Returns log(value + rest): same shape, float32.

    Args:
        values: float32, positive and normal.
        rests: rounding errors of the values, at most half a unit in their last place; None: zero.
    """
    xp = namespace(values)
    bits = values.view(xp.int32)
    exponents = (bits - SQRT_HALF_BITS) >> _MANTISSA_BITS  # so that mantissas are in [sqrt(1/2), sqrt(2))
    f = (bits - (exponents << _MANTISSA_BITS)).view(xp.float32)
    f -= 1.0
    if rests is not None:
        f += rests * ((_EXPONENT_BIAS - exponents) << _MANTISSA_BITS).view(xp.float32)
    polynomial = _evaluate(LOG_POLYNOMIAL, f)
    squares = f * f
    powers = xp.astype(exponents, xp.float32)
    logarithms = f * squares
    logarithms *= polynomial
    logarithms += powers * LOG2_LOW
    squares *= 0.5
    logarithms -= squares
    logarithms += f
    powers *= LOG2_HIGH
    logarithms += powers
    return logarithms


@without_warnings
def masses_of(values: Array, largest: Array) -> Array:
    """Returns e^(value - largest) in steps of 2^-44, rounded to the nearest: same shape, int64, 2^44 for the largest.

    Masses are integers, so that a sum does not depend on its order.

    Args:
        values: float32, none above its row's largest.
        largest: float32, broadcasts to the values. If it is infinite, values equal to it have mass 2^44, others 0.
    """
    xp = namespace(values)
    # If a bias exceeds float32 or no token is left, the largest value is infinite, and its difference from itself is
    # NaN. Multiplying the bits of that difference by 0 makes it 0.
    x = ((values - largest).view(xp.int32) * (values != largest)).view(xp.float32)
    x = xp.clip(x, min=MIN_LOG_WEIGHT)  # the masses of smaller values round to 0 as well
    exponents = xp.round(x * LOG2_E)
    x -= exponents * LOG2_HIGH
    x -= exponents * LOG2_LOW
    weights = _evaluate(EXP_POLYNOMIAL, x)
    weights *= x * x
    weights += x
    weights += 1.0
    powers = xp.astype(exponents, xp.int32)
    powers += _EXPONENT_BIAS + MASS_EXPONENT
    powers <<= _MANTISSA_BITS
    weights *= powers.view(xp.float32)
    return xp.astype(xp.round(weights), xp.int64)


def log_of_mass(mass: float, largest: float) -> float:
    """Returns the logarithm of a sum of masses on the scale of the row's values; infinite or NaN if `largest` is."""
    return largest + math.log(mass / MASS_OF_LARGEST) if math.isfinite(largest) else largest


def _evaluate(coefficients: tuple[float, ...], x: Array) -> Array:
    """Evaluates the polynomial with these coefficients, highest power first."""
    value = x * coefficients[0]
    value += coefficients[1]
    for coefficient in coefficients[2:]:
        value *= x
        value += coefficient
    return value
