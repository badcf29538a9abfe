"""Cosines and sines of rotations are right, and have the same bits on every machine."""

from __future__ import annotations

import hashlib

import mpmath
import numpy as np
import pytest
import torch

from outrider.engine.rotation import MAX_ANGLE, cosines_and_sines, inverse_frequencies

EXPECTED = "1659c515d59df265fa7e4e101ac588e19384a0b28c320e6e6b1d8918dd984518"
ANGLES = np.concatenate(
    [np.random.default_rng(0).uniform(0, top, 3000).astype(np.float32) for top in (0.1, 10, 1e3, 131_072, MAX_ANGLE)]
    + [np.float32([0, np.pi / 4, np.pi / 2, np.pi, 2 * np.pi, 355, 103_993, 1e-30, MAX_ANGLE])]
)


def test_they_are_the_nearest_float32():
    cosines, sines = cosines_and_sines(ANGLES)
    with mpmath.workprec(120):
        for angle, cosine, sine in zip(ANGLES[::7].tolist(), cosines[::7].tolist(), sines[::7].tolist(), strict=True):
            assert cosine == float(np.float32(float(mpmath.cos(angle))))
            assert sine == float(np.float32(float(mpmath.sin(angle))))


@pytest.mark.parametrize(("theta", "num_dims"), [(10_000.0, 64), (500_000.0, 128), (1e6, 16)])
def test_frequencies_are_the_nearest_float32(theta, num_dims):
    own = inverse_frequencies(theta, num_dims)
    with mpmath.workprec(120):
        exact = [
            float(np.float32(float(mpmath.mpf(theta) ** (mpmath.mpf(-2 * i) / num_dims)))) for i in range(num_dims // 2)
        ]
    assert own.tolist() == exact
    torchs = 1.0 / (theta ** (torch.arange(0, num_dims, 2, dtype=torch.float) / num_dims))
    np.testing.assert_allclose(own, torchs.numpy(), rtol=1e-6)


def test_the_bits_are_these_on_every_machine():
    tables = np.stack(cosines_and_sines(np.arange(4096, dtype=np.float32)[:, None] * inverse_frequencies(10_000.0, 64)))
    assert hashlib.sha256(tables.astype("<f4").tobytes()).hexdigest() == EXPECTED
