"""Uniform integers below a total, from 64 random bits, by int64 operations only."""

from __future__ import annotations

import numpy as np
import torch

from outrider.speculation.verify.rejection import _uniform_below


def test_a_share_is_the_high_half_of_a_product_of_128_bits():
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (400, 2))
    words[:4] = [[0, 0], [2**32 - 1, 2**32 - 1], [2**32 - 1, 0], [0, 2**32 - 1]]
    totals = np.minimum(rng.integers(1, 2**63, 400) >> rng.integers(0, 62, 400), 2**63 - 1).clip(1)
    totals[:4] = 2**63 - 1
    by_numpy, by_torch = (
        _uniform_below(words, totals),
        _uniform_below(torch.from_numpy(words), torch.from_numpy(totals)),
    )
    expected = [
        ((high << 32 | low) * total) >> 64 for (high, low), total in zip(words.tolist(), totals.tolist(), strict=True)
    ]
    assert by_numpy.tolist() == by_torch.tolist() == expected
