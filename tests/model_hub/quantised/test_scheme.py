from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu_kernels.group_packing import in_one_format
from outrider.model_hub.quantised.scheme import grouped_weight
from tests.model_hub.quantised.checkpoints import expected_weight, random_scales


@pytest.mark.parametrize("num_inputs", [256, 896])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 0])
@pytest.mark.parametrize(("bits", "has_zeros"), [(4, False), (4, True), (8, False)])
def test_the_kernels_have_a_format_without_loss(bits, has_zeros, group_size, num_inputs):
    """8-bit codes with zero points are not here: their differences take 9 bits, and the kernels refuse most of them."""
    generator, half = np.random.default_rng(2), 2 ** (bits - 1)
    codes = generator.integers(-half, half, (32, num_inputs), dtype=np.int8)
    scales = random_scales(generator, 32, num_inputs // group_size if group_size else 1)
    zeros = generator.integers(-half, half, scales.shape, dtype=np.int8) if has_zeros else None
    weight = grouped_weight(codes, scales, zeros, bits=bits)
    expected = expected_weight(codes, np.int64(0) if zeros is None else zeros, scales)
    assert np.array_equal(weight.dequantise(), expected)
    packed, weights = in_one_format([weight, weight])
    assert packed.bits == bits or group_size < 64
    for each in weights:
        assert np.array_equal(each.dequantise(), expected)
