"""The logarithm and exponential of `outrider.engine.sampler.elementary`, written again in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_LOG_POLYNOMIAL = np.asarray(
    [
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ],
    dtype=np.float32,
)
_EXP_POLYNOMIAL = np.asarray(
    [
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ],
    dtype=np.float32,
)
_LOG2_HIGH, _LOG2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is log 2
_LOG2_E = np.float32(1.44269504088896)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_MANTISSA_BITS = np.int32(23)
_EXPONENT_BIAS = np.int32(127)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_MASS_EXPONENT = 44
_LOWEST = np.float32(-32.0)


def logarithm(values: Floats, rests: Floats | None = None) -> Floats:
    """Returns log(value + rest) as `outrider.engine.sampler.elementary.logarithm` does: same shape, float32."""
    bits = values.view(np.int32)
    exponents = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS  # so that mantissas are in [sqrt(1/2), sqrt(2))
    f = (bits - (exponents << _MANTISSA_BITS)).view(np.float32)
    f -= _ONE
    if rests is not None:
        f += rests * ((_EXPONENT_BIAS - exponents) << _MANTISSA_BITS).view(np.float32)
    polynomial = _evaluate(_LOG_POLYNOMIAL, f)
    squares = f * f
    powers = exponents.astype(np.float32)
    logarithms = f * squares
    logarithms *= polynomial
    logarithms += powers * _LOG2_LOW
    squares *= _HALF
    logarithms -= squares
    logarithms += f
    powers *= _LOG2_HIGH
    logarithms += powers
    return logarithms


def masses_of(values: Floats, largest: Floats | np.float32) -> npt.NDArray[np.int64]:
    """Returns e^(value - largest) in steps of 2^-44, like `masses_of` of the sampler: same shape, int64."""
    with np.errstate(invalid="ignore"):
        x = values - largest
    infinite = np.isinf(largest)
    if infinite.any():  # a bias exceeds float32, or no id is left: infinite values share the mass
        x = np.where(infinite, np.where(values == largest, np.float32(0.0), _LOWEST), x)
    np.maximum(x, _LOWEST, out=x)  # masses of smaller values round to 0
    exponents = np.rint(x * _LOG2_E)
    x -= exponents * _LOG2_HIGH
    x -= exponents * _LOG2_LOW
    weights = _evaluate(_EXP_POLYNOMIAL, x)
    weights *= x * x
    weights += x
    weights += _ONE
    powers = exponents.astype(np.int32)
    powers += _EXPONENT_BIAS + _MASS_EXPONENT
    powers <<= _MANTISSA_BITS
    weights *= powers.view(np.float32)
    return np.rint(weights, out=weights).astype(np.int64)


def _evaluate(coefficients: Floats, x: Floats) -> Floats:
    """Evaluates a polynomial. The coefficient of the highest power comes first."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value
