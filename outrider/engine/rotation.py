"""Cosines and sines of rotary position embeddings, with equal bits on every machine.

Libraries choose an implementation of cosine for the processor, and their results differ in the last bit. Here every
step is an addition, subtraction or multiplication of float64, which IEEE 754 defines to the last bit (numpy's polyval
is Horner's scheme).

The reduction is Cody and Waite's, and the polynomials are those of fdlibm (Sun, 1993). They are accurate to one unit in
the last place of float64, before the result is rounded to float32.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Turn(NamedTuple):
    """The rotation of a layer's keys by a number of positions. Halves of the rotated dimensions form pairs."""

    cosines: Floats  # [rotated dimensions / 2]
    sines: Floats


MAX_ANGLE = float(1 << 20)
"""Largest angle in radians. Beyond it the reduction would lose bits: up to here, the number of quarter turns (20 bits)
times the first part of pi/2 (33 bits) fits a float64."""

_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_TWO_OVER_PI = 6.36619772367581382433e-01
_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
_DIGITS = Context(prec=40)


def inverse_frequencies(theta: float, num_dims: int) -> Floats:
    """Returns theta^(-2i / num_dims) for every i, rounded to float32: [num_dims / 2]. Decimal arithmetic gives the same
    result on every machine.
    """
    base = Decimal(theta)
    exponents = (_DIGITS.divide(Decimal(-2 * index), Decimal(num_dims)) for index in range(num_dims // 2))
    return np.array([float(_DIGITS.power(base, exponent)) for exponent in exponents], dtype=np.float32)


def cosines_and_sines(angles: Floats) -> tuple[Floats, Floats]:
    """Returns the cosines and sines of angles in radians, in the angles' shape.

    Raises: ValueError if an angle is not between 0 and `MAX_ANGLE`.
    """
    x = angles.astype(np.float64)
    if x.size and not (x.min() >= 0 and x.max() <= MAX_ANGLE):
        raise ValueError(f"angles from {x.min():g} to {x.max():g} cannot be rotated exactly, only 0 to {MAX_ANGLE:g}")
    quarters = np.rint(x * _TWO_OVER_PI)
    for part in _HALF_PI:
        x -= quarters * part  # after the last part, x is within pi/4 of 0
    squares = x * x
    sines = x + x * squares * np.polyval(_SINE, squares)
    cosines = 1.0 - squares * 0.5 + squares * squares * np.polyval(_COSINE, squares)
    turns = quarters.astype(np.int64) & 3
    is_odd = (turns & 1).astype(bool)
    signs_of_cosine = np.where((turns == 1) | (turns == 2), -1.0, 1.0)
    signs_of_sine = np.where(turns >= 2, -1.0, 1.0)
    return (
        (np.where(is_odd, sines, cosines) * signs_of_cosine).astype(np.float32),
        (np.where(is_odd, cosines, sines) * signs_of_sine).astype(np.float32),
    )
