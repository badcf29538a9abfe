"""Luck of 64 bits as a share of a sum of masses, in operations of int64 alone."""

from __future__ import annotations

import numpy as np
import torch

from outrider.speculation.verify.rejection import _share


def test_a_share_is_the_high_half_of_a_product_of_128_bits():
    rng = np.random.default_rng(1)
    luck = rng.integers(0, 2**32, (400, 2))
    luck[:4] = [[0, 0], [2**32 - 1, 2**32 - 1], [2**32 - 1, 0], [0, 2**32 - 1]]
    totals = np.minimum(rng.integers(1, 2**63, 400) >> rng.integers(0, 62, 400), 2**63 - 1).clip(1)
    totals[:4] = 2**63 - 1
    by_numpy, by_torch = _share(luck, totals), _share(torch.from_numpy(luck), torch.from_numpy(totals))
    expected = [
        ((high << 32 | low) * total) >> 64 for (high, low), total in zip(luck.tolist(), totals.tolist(), strict=True)
    ]
    assert by_numpy.tolist() == by_torch.tolist() == expected
