from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.cpu_kernels.operations import assert_within, differing_rows, rms_norm, rounding_of

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = 2.0**-24


def problem(dtype, num_rows, width, *, scale=1.0):
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn((num_rows, width), generator=generator) * scale).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype).float()
    return x, weight


def assert_is_norm(actual, x, weight, epsilon):
    x64 = x.double()
    normalised = x64 / torch.sqrt(x64.square().mean(dim=1, keepdim=True) + epsilon)
    expected = normalised * weight.double()
    # Errors come from the sum of `width` squares, a few more operations, and two roundings to the rows' dtype, as in
    # transformers: one before the multiplication with the weight and one after.
    relative = (x.shape[1] / 2 + 8) * ROUNDING + 2 * rounding_of(x.dtype)
    assert_within(actual, expected, relative * 1.01 * expected.abs() + 1e-36)


@pytest.mark.pairwise
@pytest.mark.parametrize("width", [1, 7, 15, 16, 17, 31, 48, 64, 100, 576, 1000])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 35])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_divided_by_their_root_mean_square(kernels, dtype, num_rows, width):
    x, weight = problem(dtype, num_rows, width)
    assert_is_norm(rms_norm(kernels, x, weight, 1e-5), x, weight, 1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 50),
    width=st.integers(1, 300),
    exponent=st.integers(-12, 12),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1]),
    num_threads=st.integers(1, 3),
)
def test_any_shape_and_scale(library, teams, dtype, num_rows, width, exponent, epsilon, num_threads):
    x, weight = problem(dtype, num_rows, width, scale=10.0**exponent)
    assert_is_norm(rms_norm(teams(library, num_threads), x, weight, epsilon), x, weight, epsilon)


def test_a_row_of_zeros_stays_one(kernels):
    assert not rms_norm(kernels, torch.zeros((2, 33)), torch.ones(33), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(library, teams, dtype):
    x, weight = problem(dtype, 70, 100)
    alone = torch.cat([rms_norm(teams(library, 1), row.unsqueeze(0), weight, 1e-5) for row in x])
    for num_threads in (1, 2, 3):
        for rows in (slice(0, 70), slice(13, 30), slice(69, 70)):
            together = rms_norm(teams(library, num_threads), x[rows], weight, 1e-5)
            assert differing_rows(together, alone[rows]) == []
