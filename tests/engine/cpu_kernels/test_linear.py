"""Packed linear layers against a product in float64, with bounds from the theory of rounding errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.cpu_kernels.group_quantisation import quantise_groups
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.matrices import PANEL, quantise_rows
from outrider.engine.kv_cache.tensor_planes import words_of
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS
from tests.engine.cpu_kernels.operations import assert_within, differing_rows, linear, pack, rounding_of

ROUNDING = 2.0**-24  # relative error of float32, in which products are summed
KINDS = {
    "float32": (torch.float32, torch.float32, False),
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "int8-float32": (torch.float32, torch.float32, True),
    "int8-bfloat16": (torch.bfloat16, torch.bfloat16, True),
    "bfloat16-weights-float32-rows": (torch.float32, torch.bfloat16, False),
}
"""Dtypes of rows and of weights, and whether both become int8."""
GROUP = 64
"""Number of consecutive features of a row that share a scale in int8."""

SHAPES = [(1, 1, 1), (1, 2, 17), (2, 15, 16), (3, 31, 33), (5, 64, 48), (7, 65, 47),
          (13, 96, 31), (17, 33, 80), (33, 70, 35), (40, 130, 18)]  # fmt: skip
"""(number of rows, in_features, out_features)."""


class Problem:
    """Rows, weights and bias, the expected result, and the error that rounding may cause.

    `seed` determines weights and bias. Rows depend only on their shape.
    """

    def __init__(self, kind, num_rows, in_features, out_features, *, has_bias=True, seed=0):
        self.dtype, weight_dtype, self.is_quantised = KINDS[kind]
        x = torch.randn((num_rows, in_features), generator=torch.Generator().manual_seed(99))
        # Rows fit the weights' type, since paths may treat additional bits of rows in different ways.
        self.x = x.to(weight_dtype).to(self.dtype)
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn((out_features, in_features), generator=generator).to(weight_dtype)
        self.bias = torch.randn(out_features, generator=generator).to(self.dtype) if has_bias else None
        weight, x = self.packed_weight(), self.multiplied_rows()
        bias = 0.0 if self.bias is None else self.bias.double()
        self.expected = x @ weight.T + bias
        # Higham, Accuracy and Stability of Numerical Algorithms, 3.1: the error of a sum of n products, each rounded
        # once. int8 sums are exact within a group, so their bound is tight enough to notice one wrong product.
        magnitude = x.abs() @ weight.abs().T + (0.0 if self.bias is None else self.bias.double().abs())
        num_rounded = -(-in_features // GROUP) if self.is_quantised else in_features
        self.allowed_in_float = (num_rounded + 4) * ROUNDING * magnitude + 1e-36  # subnormal numbers may be lost

    def packed_weight(self):
        """Returns the weights that the kernels multiply with: [out_features, in_features] float64."""
        if not self.is_quantised:
            return self.weight.double()
        quantised, scales = map(torch.from_numpy, quantise_rows(words_of(self.weight)))
        return quantised.double() * scales.double().unsqueeze(1)

    def multiplied_rows(self):
        """Returns the rows that the kernels multiply: [num_rows, in_features] float64."""
        return quantised_rows(self.x.float()) if self.is_quantised else self.x.double()

    def pack(self, kernels):
        return pack(kernels, [self.weight], [self.bias], quantise="int8" * self.is_quantised)

    def check(self, kernels, matrix=None):
        """Checks the product with `matrix`, by default this problem's. The result may be rounded to the rows' dtype."""
        allowed = self.allowed_in_float + rounding_of(self.dtype) * (self.expected.abs() + self.allowed_in_float)
        assert_within(linear(kernels, matrix or self.pack(kernels), self.x), self.expected, allowed * 1.01)


def quantised_rows(x):
    """Rounds rows [num_rows, in_features] float32 like int8: whole numbers up to 127, times a scale for each GROUP.

    Returns float64.
    """
    num_rows, in_features = x.shape
    groups = torch.nn.functional.pad(x, (0, -in_features % GROUP)).view(num_rows, -1, GROUP)
    largest = groups.abs().amax(dim=2, keepdim=True)
    steps = torch.full_like(largest, 127.0) / largest  # `127.0 / largest` would be rounded twice
    whole = torch.where(largest > 0, torch.round(groups * steps), 0.0)
    assert bool((whole.abs() <= 127).all())
    return (whole.double() * (largest / 127.0).double()).view(num_rows, -1)[:, :in_features]


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
def test_a_product_is_that_of_float64_up_to_rounding(kernels, kind, shape, has_bias):
    Problem(kind, *shape, has_bias=has_bias).check(kernels)


@pytest.mark.pairwise
@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8-float32"])
def test_every_number_of_rows_that_one_product_takes(kernels, kind, panels):
    for in_features in (16, 32, 72, 192):
        matrix = Problem(kind, 1, in_features, panels * PANEL).pack(kernels)
        for num_rows in range(1, 36):
            Problem(kind, num_rows, in_features, panels * PANEL).check(kernels, matrix)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    num_rows=st.integers(1, 70),
    in_features=st.integers(1, 140),
    out_features=st.integers(1, 100),
    num_threads=st.integers(1, 3),
)
def test_any_shape_is_within_the_same_bounds(library, teams, kind, num_rows, in_features, out_features, num_threads):
    Problem(kind, num_rows, in_features, out_features).check(teams(library, num_threads))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["biases", "one_bias_of_several"])
def test_several_weights_packed_together_are_one_after_the_other(kernels, kind, has_bias):
    parts = [
        Problem(kind, 6, 33, features, seed=features, has_bias=has_bias or features == 16) for features in (48, 16, 21)
    ]
    x = parts[0].x
    matrix = pack(
        kernels, [part.weight for part in parts], [part.bias for part in parts], quantise="int8" * parts[0].is_quantised
    )
    together = linear(kernels, matrix, x)
    apart = torch.cat([linear(kernels, part.pack(kernels), x) for part in parts], dim=1)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_packed_weight_comes_back(kernels, kind):
    problem = Problem(kind, 1, 37, 45)
    matrix = problem.pack(kernels)
    rows = torch.from_numpy(np.stack([matrix.row(index) for index in range(45)]))
    assert torch.equal(rows, problem.packed_weight().float())


def test_int4_rows_are_those_of_rounding_in_groups(kernels):
    weight = Problem("bfloat16", 1, 96, 45).weight
    matrix = pack(kernels, [weight], quantise="int4")
    rows = np.stack([matrix.row(index) for index in range(45)])
    assert np.array_equal(rows, quantise_groups(weight.float().numpy()).dequantise())


def test_int8_is_as_near_as_127_steps_allow(kernels):
    problem = Problem("int8-float32", 8, 96, 40, has_bias=False)
    exact = problem.x.double() @ problem.weight.double().T
    step = problem.weight.double().abs().amax(dim=1) / 127
    allowed = problem.x.double().abs().sum(dim=1, keepdim=True) * step / 2 + problem.allowed_in_float
    groups = [problem.x.double()[:, :GROUP], problem.x.double()[:, GROUP:]]
    for first, group in zip((0, GROUP), groups, strict=True):  # adds the error of rounding the rows
        weights = problem.packed_weight()[:, first : first + GROUP].abs().sum(dim=1)
        allowed += group.abs().amax(dim=1, keepdim=True) / 127 / 2 * weights
    assert_within(linear(kernels, problem.pack(kernels), problem.x), exact, allowed * 1.0001)


def test_the_largest_int8_products_do_not_saturate(kernels):
    """Sums of the largest magnitudes of both signs are exact, and the next group may cancel them to exactly zero."""
    x = torch.full((3, 256), 127.0)
    x[1] = -127.0
    x[2, 128:] = -127.0
    weight = torch.full((33, 256), 127.0)
    weight[1::2] = -127.0
    signs = torch.tensor([[1.0], [-1.0], [0.0]]) * torch.tensor([1.0, -1.0]).repeat(17)[:33]
    assert torch.equal(linear(kernels, pack(kernels, [weight], quantise="int8"), x), signs * (256 * 127.0 * 127.0))


@pytest.mark.parametrize("kind", ["int8-float32", "int8-bfloat16"])
def test_rows_that_cannot_be_rounded_to_int8_spoil_no_others(kernels, kind):
    """NaN or infinity makes a row NaN. Zeros and the smallest numbers give zeros, large numbers their products."""
    problem = Problem(kind, 7, 150, 35, has_bias=False)
    weight = problem.packed_weight()
    matrix = problem.pack(kernels)
    plain = linear(kernels, matrix, problem.x)
    x = problem.x.clone()
    x[0, 70], x[1, 149], x[2, 0] = float("nan"), float("inf"), float("-inf")
    x[3] = 0.0
    x[4] *= 1e33
    x[5] *= 1e-40
    found = linear(kernels, matrix, x)
    assert found[:3].isnan().all()
    assert not found[3].any()
    expected = quantised_rows(x[4:5].float()) @ weight.T
    assert_within(found[4:5], expected, expected.abs() * 0.02 + 1e31)
    assert bool((found[5].abs() < 1e-33).all())
    assert differing_rows(found[6:], plain[6:]) == []


def test_a_wrong_product_would_be_noticed(kernels):
    """Negative control: one weight that is wrong by one percent leads far outside the bounds."""
    problem = Problem("float32", 3, 64, 33)
    problem.weight[20, 30] *= 1.01
    with pytest.raises(AssertionError, match="more than rounding explains"):
        problem.check(kernels)


def test_memory_that_cannot_be_had_is_an_error_and_the_workspace_stays_usable(kernels):
    problem = Problem("bfloat16", 4, 33, 20)
    matrix, workspace = problem.pack(kernels), Workspace(kernels.library)
    y = torch.empty((4, 20), dtype=torch.bfloat16)

    def run(num_rows):
        kernels.library.functions.outrider_linear(
            kernels.team, workspace.handle, 1, problem.x.data_ptr(), num_rows, matrix.struct, y.data_ptr()
        )

    run(4)
    expected = y.clone()
    with pytest.raises(MemoryError, match="outrider_linear"):
        run(2**44)
    run(4)
    assert torch.equal(y, expected)


# ---- bits

COMPANIES = [(0, 2), (0, 5), (3, 8), (0, 16), (5, 22), (0, 33), (1, 70), (0, 70)]
"""(first row, end) of ranges of rows that are computed together."""


def rows_that_differ(kernels_alone, kernels, kind) -> list[tuple[int, int, int]]:
    """Returns (first, end, row) of rows whose output bits differ between one batch [first, end) and the row alone."""
    problem = Problem(kind, 70, 1024, 240, has_bias=False)
    # The halves cancel, so only rounding errors of the sum remain, and bfloat16 does not hide differences in these.
    problem.x[:, 512:], problem.weight[:, 512:] = problem.x[:, :512], -problem.weight[:, :512]
    matrix_alone, matrix = problem.pack(kernels_alone), problem.pack(kernels)
    alone = torch.cat([linear(kernels_alone, matrix_alone, problem.x[row : row + 1]) for row in range(70)])
    return [
        (first, end, row)
        for first, end in COMPANIES
        for row in differing_rows(linear(kernels, matrix, problem.x[first:end]), alone[first:end])
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_its_company_or_on_who_shares_the_work(library, teams, kind):
    for num_threads in (1, 2, 3):
        assert rows_that_differ(teams(library, 1), teams(library, num_threads), kind) == []


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_breaks_the_rule_is_caught(rule_breaking_library, teams, kind):
    """Negative control of the test above."""
    kernels = teams(rule_breaking_library, 1)
    assert rows_that_differ(kernels, kernels, kind)


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_path_has_the_same_bits_on_every_processor(portable_library, made_libraries, teams, kind):
    """Nodes that report equal numerics may continue each other's answers, even if one has no AVX2 and FMA."""
    problem = Problem(kind, 17, 1000, 80)
    by_library = [
        linear(kernels, problem.pack(kernels), problem.x)
        for kernels in (teams(portable_library, 1), teams(made_libraries("generic"), 1))
    ]
    assert differing_rows(*by_library) == []
