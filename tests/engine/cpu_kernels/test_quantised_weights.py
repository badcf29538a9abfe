"""Products with quantised weights of checkpoints: exact within a group, with the same bits in any batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.matrices import PackedMatrix, PlainLinear, WeightArena
from tests.engine.cpu_kernels.grouped_weights import FORMATS, random_weight
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS
from tests.engine.cpu_kernels.operations import assert_within, differing_rows, linear
from tests.engine.cpu_kernels.test_linear import ROUNDING, quantised_rows

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15, 16, 17, 25, 33, 49)
OUT_FEATURES = (16, 47, 80)

pytestmark = pytest.mark.parametrize("name", FORMATS)


def depths(name):
    """Returns numbers of inputs: one group or unit, and several, if possible no multiple of 64."""
    _, group_size, unit_size, _ = FORMATS[name]
    step = unit_size or group_size
    return (step, 3 * step, -(-500 // step) * step)


def pack_quantised(kernels, *weights, biases=None, interleave=False):
    linears = [PlainLinear(weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)]
    return PackedMatrix(kernels, WeightArena(), linears, interleave=interleave)


def random_rows(num_rows, in_features, dtype=torch.float32, seed=5):
    return torch.randn((num_rows, in_features), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(kernels, matrix, weight, x):
    """Compares the product with one in float64 of the same rounded rows, with bounds for float32 sums of groups."""
    dequantised = torch.from_numpy(weight.dequantise()).double()
    rows = quantised_rows(x.float())
    # Rounding is relative to scale * code and to the minimum, which may cancel.
    sizes = np.repeat(np.abs(weight.scales.values(weight.num_groups)), weight.group_size, axis=1) * np.abs(
        weight.codes.astype(np.float32)
    )
    if weight.minima is not None:
        sizes += np.repeat(np.abs(weight.minima.values(weight.num_groups)), weight.group_size, axis=1)
    magnitude = rows.abs() @ torch.from_numpy(sizes).double().T
    num_rounded = 2 * weight.shape[1] // min(weight.group_size, 32) + 4
    allowed = num_rounded * ROUNDING * magnitude + 1e-30
    assert_within(linear(kernels, matrix, x), rows @ dequantised.T, allowed)


def test_a_product_is_that_of_float64_up_to_rounding(kernels, name):
    for in_features in depths(name):
        for out_features in OUT_FEATURES:
            weight = random_weight(name, out_features, in_features)
            matrix = pack_quantised(kernels, weight)
            for num_rows in ROW_COUNTS:
                check(kernels, matrix, weight, random_rows(num_rows, in_features))


def test_a_rows_bits_do_not_depend_on_its_company_or_on_who_shares_the_work(library, teams, name):
    in_features = depths(name)[2]
    weight = random_weight(name, 150, in_features)
    x = random_rows(70, in_features)
    alone_kernels = teams(library, 1)
    matrix = pack_quantised(alone_kernels, weight)
    alone = torch.cat([linear(alone_kernels, matrix, x[row : row + 1]) for row in range(70)])
    bounds = (0, 1, 3, 6, 10, 15, 21, 28, 36, 48, 70)
    for num_threads in (1, 2, 3):
        kernels = teams(library, num_threads)
        for first, end in [*pairwise(bounds), (0, 16), (0, 17), (0, 33), (0, 70)]:
            assert differing_rows(linear(kernels, matrix, x[first:end]), alone[first:end]) == []


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
def test_a_kernel_that_breaks_the_rule_is_caught(rule_breaking_library, teams, name):
    """Negative control of the test above."""
    kernels = teams(rule_breaking_library, 1)
    weight = random_weight(name, 150, 1024)
    matrix, x = pack_quantised(kernels, weight), random_rows(70, 1024)
    alone = torch.cat([linear(kernels, matrix, x[row : row + 1]) for row in range(70)])
    assert differing_rows(linear(kernels, matrix, x), alone)


def test_every_row_of_the_packed_weight_is_that_of_dequantise(kernels, name):
    for in_features in depths(name):
        weight = random_weight(name, 45, in_features)
        matrix = pack_quantised(kernels, weight)
        rows = np.stack([matrix.row(index) for index in range(45)])
        assert np.array_equal(rows, weight.dequantise())


def test_several_weights_packed_together_are_one_after_the_other(kernels, name):
    in_features = depths(name)[2]
    weights = [random_weight(name, size, in_features, seed=size) for size in (48, 16, 21)]
    x = random_rows(9, in_features)
    together = linear(kernels, pack_quantised(kernels, *weights), x)
    apart = torch.cat([linear(kernels, pack_quantised(kernels, weight), x) for weight in weights], dim=1)
    assert differing_rows(together, apart) == []


def test_interleaved_weights_alternate_panel_by_panel_and_biases_are_added(kernels, name):
    in_features = depths(name)[1]
    weights = [random_weight(name, 21, in_features, seed=seed) for seed in (1, 2)]
    bias = np.arange(21, dtype=np.float32)
    x = random_rows(3, in_features)
    apart = [linear(kernels, pack_quantised(kernels, weight), x) for weight in weights]
    together = linear(kernels, pack_quantised(kernels, *weights, biases=[None, bias], interleave=True), x)
    gate, up = together[:, [*range(16), *range(32, 37)]], together[:, [*range(16, 32), *range(48, 53)]]
    assert torch.equal(gate, apart[0])
    assert torch.equal(up, apart[1] + torch.from_numpy(bias))


def test_edges_of_rows_and_weights(kernels, name):
    """Groups of zeros give zeros, NaN and infinity spoil their row only, and the largest codes do not saturate."""
    in_features = depths(name)[2]
    weight = random_weight(name, 33, in_features)
    codes = weight.codes.copy()
    codes[0], codes[1] = weight.codes.max(), weight.codes.min()
    weight = GroupedWeight(codes, weight.group_size, weight.scales, weight.minima)
    matrix = pack_quantised(kernels, weight)
    x = random_rows(8, in_features)
    x[0], x[1], x[2] = 1.0, -1.0, torch.tensor([1.0, -1.0]).repeat(in_features // 2)
    x[3] = 0.0
    x[4, 64:] = 0.0
    x[5] *= 1e30
    check(kernels, matrix, weight, x)
    plain = linear(kernels, matrix, x)
    assert not plain[3].any()
    x[5, 1], x[6, -1] = float("nan"), float("-inf")
    found = linear(kernels, matrix, x)
    assert found[5:7].isnan().all()
    others = [0, 1, 2, 3, 4, 7]
    assert differing_rows(found[others], plain[others]) == []


def test_rows_in_bfloat16_are_multiplied_like_their_values_in_float32(kernels, name):
    in_features = depths(name)[2]
    matrix = pack_quantised(kernels, random_weight(name, 40, in_features))
    x = random_rows(14, in_features, torch.bfloat16)
    assert torch.equal(linear(kernels, matrix, x), linear(kernels, matrix, x.float()).to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
def test_all_paths_have_the_same_bits(library, made_libraries, teams, name):
    """Integer sums are exact, and groups are added in one order with the same roundings."""
    in_features = depths(name)[2]
    weight, x = random_weight(name, 50, in_features), random_rows(19, in_features)
    found = [
        linear(kernels, pack_quantised(kernels, weight), x)
        for kernels in (teams(library, 1), teams(made_libraries("generic"), 1))
    ]
    assert differing_rows(*found) == []
