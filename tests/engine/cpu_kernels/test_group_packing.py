"""Formats of packed weights: which one a checkpoint's weights get, what it is called, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu_kernels.group_packing import PackedFormat, have_one_format, in_one_format
from outrider.engine.cpu_kernels.group_quantisation import quantise_groups
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors
from outrider.engine.cpu_kernels.library import ElementType
from outrider.errors import ModelError
from tests.engine.cpu_kernels.grouped_weights import FORMATS, random_weight

EXPECTED = {
    "Q8_0": ("int8 in groups of 32", 8.5),
    "Q5_1": ("int8 in groups of 32 with minima", 9.0),
    "Q5_K": ("int8 in groups of 32 with minima", 8.625),
    "Q6_K": ("int8 in groups of 16", 8.625),
    "IQ4_XS": ("int8 in groups of 32", 8.625),
    "Q4_0": ("int4 in groups of 32", 4.5),
    "Q4_1": ("int4 in groups of 32 with minima", 5.0),
    "Q4_K": ("int4 in groups of 32 with minima", 4.625),
    "AWQ": ("int4 in groups of 128 with zero points", 4.25),
    "GPTQ": ("int4 in groups of 64 with zero points", 4.5),
    "GPTQ-8": ("int8 in groups of 32", 8.5),
    "AWQ-32": ("int8 in groups of 32", 8.5),
}
"""Texts, and bits of one weight with its factors."""


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_a_weight_and_its_size(name):
    weight = random_weight(name, 16, 512)
    packed_format, (rewritten,) = in_one_format([weight])
    assert (str(packed_format), packed_format.panel_bytes(512) * 8 / weight.codes.size) == EXPECTED[name]
    assert np.array_equal(rewritten.dequantise(), weight.dequantise())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("Q4_0", "Q8_0"), "int8 in groups of 32"),
        (("Q4_0", "Q4_1"), "int8 in groups of 32 with minima"),
        (("Q5_1", "Q8_0"), "int8 in groups of 32 with minima"),
        (("Q4_K", "Q5_K"), "int8 in groups of 32 with minima"),
        (("AWQ", "GPTQ"), "int4 in groups of 64 with zero points"),
        (("AWQ", "Q8_0"), "int8 in groups of 32"),
    ],
    ids="-".join,
)
def test_weights_of_different_formats_get_one_that_has_room_for_all(names, expected):
    weights = [random_weight(name, 16, 512) for name in names]
    assert not have_one_format(weights)
    packed_format, rewritten = in_one_format(weights)
    assert str(packed_format) == expected
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


def test_names_of_formats_without_groups():
    names = {kind: str(PackedFormat(kind)) for kind in (ElementType.BFLOAT16, ElementType.INT8)}
    assert names == {
        ElementType.BFLOAT16: "bfloat16",
        ElementType.INT8: "int8 with a scale for each output feature",
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_step(bits):
    weight = np.random.default_rng(0).normal(0, 0.1, (40, 96)).astype(np.float32)
    weight[3, 32:64] = 0.25
    weight[4] = 0.0
    weight[5, :32] = np.linspace(1.0, 3.0, 32)
    quantised = quantise_groups(weight, bits)
    assert quantised.group_size == 32
    groups = weight.reshape(40, 3, 32)
    ranges = np.ptp(groups, axis=2) / 15 if bits == 4 else np.abs(groups).max(axis=2) / 127
    error = np.abs(quantised.dequantise().reshape(groups.shape) - groups)
    # Factors are rounded to float16, whose steps are 2^-11 of their size.
    assert (error <= (ranges / 2 * 1.001 + np.abs(groups).max(axis=2) * 2.0**-10)[:, :, None] + 1e-7).all()
    assert str(in_one_format([quantised])[0]) == f"int{bits} in groups of 32" + " with minima" * (bits == 4)


def test_weights_that_were_rounded_before_come_back():
    before = random_weight("Q4_1", 64, 128)
    codes = before.codes.copy()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = GroupFactors(np.abs(before.scales.units) + np.float16(0.001))
    before = GroupedWeight(codes, 32, scales, before.minima)
    assert np.array_equal(quantise_groups(before.dequantise(), 4).codes, codes)


def test_what_cannot_be_rounded_in_groups_is_refused():
    with pytest.raises(ModelError, match="48 inputs cannot be divided into groups of 32"):
        quantise_groups(np.zeros((16, 48), np.float32), 4)
    with pytest.raises(ModelError, match="65,504"):
        quantise_groups(np.full((16, 32), 1e6, np.float32), 4)
