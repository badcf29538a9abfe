"""Formats of packed weights: which one a checkpoint's weights get, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu_kernels.group_packing import have_one_format, in_one_format
from outrider.engine.cpu_kernels.group_quantisation import quantise_groups
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors
from outrider.errors import ModelError
from tests.engine.cpu_kernels.grouped_weights import FORMATS, random_weight

EXPECTED = {
    "Q8_0": ("INT8_GROUPS_32, 32", 8.5),
    "Q5_1": ("INT8_GROUPS_32_MINIMA, 32", 9.0),
    "Q5_K": ("INT8_GROUPS_32_MINIMA, 32", 8.625),
    "Q6_K": ("INT8_GROUPS_16, 16", 8.625),
    "IQ4_XS": ("INT8_GROUPS_32, 32", 8.625),
    "Q4_0": ("INT4_GROUPS_32, 32", 4.5),
    "Q4_1": ("INT4_GROUPS_32_MINIMA, 32", 5.0),
    "Q4_K": ("INT4_GROUPS_32_MINIMA, 32", 4.625),
    "AWQ": ("INT4_ZEROS, 128", 4.25),
    "GPTQ": ("INT4_ZEROS, 64", 4.5),
    "GPTQ-8": ("INT8_GROUPS_32, 32", 8.5),
    "AWQ-32": ("INT8_GROUPS_32, 32", 8.5),
}
"""Types and sizes of groups, and bits of one weight with its factors."""


def described(packed_format):
    return f"{packed_format.type.name}, {packed_format.group_size}"


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_a_weight_and_its_size(name):
    weight = random_weight(name, 16, 512)
    packed_format, (rewritten,) = in_one_format([weight])
    assert (described(packed_format), packed_format.panel_bytes(512) * 8 / weight.codes.size) == EXPECTED[name]
    assert np.array_equal(rewritten.dequantise(), weight.dequantise())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("Q4_0", "Q8_0"), "INT8_GROUPS_32, 32"),
        (("Q4_0", "Q4_1"), "INT8_GROUPS_32_MINIMA, 32"),
        (("Q5_1", "Q8_0"), "INT8_GROUPS_32_MINIMA, 32"),
        (("Q4_K", "Q5_K"), "INT8_GROUPS_32_MINIMA, 32"),
        (("AWQ", "GPTQ"), "INT4_ZEROS, 64"),
        (("AWQ", "Q8_0"), "INT8_GROUPS_32, 32"),
    ],
    ids="-".join,
)
def test_weights_of_different_formats_get_one_that_has_room_for_all(names, expected):
    weights = [random_weight(name, 16, 512) for name in names]
    assert not have_one_format(weights)
    packed_format, rewritten = in_one_format(weights)
    assert described(packed_format) == expected
    for before, after in zip(weights, rewritten, strict=True):
        assert np.array_equal(after.dequantise(), before.dequantise())


@pytest.mark.parametrize("names", [("Q6_K", "Q4_K"), ("Q8_0", "Q4_K")], ids="-".join)
def test_weights_that_no_format_has_room_for_are_refused(names):
    with pytest.raises(ModelError, match=r"have no format for quantised weights in groups of .* dequantized"):
        in_one_format([random_weight(name, 16, 512) for name in names])


def test_plain_and_quantised_weights_have_no_format_in_common():
    plain = np.zeros((16, 512), np.uint16)
    assert not have_one_format([plain, random_weight("Q8_0", 16, 512)])
    assert have_one_format([plain, plain])


def test_rounding_is_within_half_a_step():
    weight = np.random.default_rng(0).normal(0, 0.1, (40, 96)).astype(np.float32)
    weight[3, 32:64] = 0.25
    weight[4] = 0.0
    weight[5, :32] = np.linspace(1.0, 3.0, 32)
    quantised = quantise_groups(weight)
    assert quantised.group_size == 32
    groups = weight.reshape(40, 3, 32)
    ranges = np.ptp(groups, axis=2) / 15
    error = np.abs(quantised.dequantise().reshape(groups.shape) - groups)
    # Factors are rounded to float16, whose steps are 2^-11 of their size.
    assert (error <= (ranges / 2 * 1.001 + np.abs(groups).max(axis=2) * 2.0**-10)[:, :, None] + 1e-7).all()
    assert described(in_one_format([quantised])[0]) == "INT4_GROUPS_32_MINIMA, 32"


def test_weights_that_were_rounded_before_come_back():
    before = random_weight("Q4_1", 64, 128)
    codes = before.codes.copy()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = GroupFactors(np.abs(before.scales.units) + np.float16(0.001))
    before = GroupedWeight(codes, 32, scales, before.minima)
    assert np.array_equal(quantise_groups(before.dequantise()).codes, codes)


def test_what_cannot_be_rounded_in_groups_is_refused():
    with pytest.raises(ModelError, match="48 inputs cannot be divided into groups of 32"):
        quantise_groups(np.zeros((16, 48), np.float32))
    with pytest.raises(ModelError, match="65,504"):
        quantise_groups(np.full((16, 32), 1e6, np.float32))
