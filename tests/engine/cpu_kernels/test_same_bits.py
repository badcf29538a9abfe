"""The paths avx512 and avx512_bf16 compute the same bits, subnormal numbers, infinities and NaN included."""

from __future__ import annotations

from time import thread_time
from timeit import repeat

import pytest
import torch

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels import dot_product_speed
from outrider.engine.cpu_kernels.library import ElementType, KernelLibrary
from outrider.engine.cpu_kernels.paths import SAME_BITS, choose_kernels
from outrider.engine.input_batch import SequenceRows, build_input_batch
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS, REAL_PATHS
from tests.engine.cpu_kernels.operations import bits, linear, pack, paged_attention
from tests.engine.cpu_kernels.test_experts import CASES, Layer

PAIR = ("avx512", "avx512_bf16")
ARE_HERE = set(PAIR) <= set(REAL_PATHS)
SCALES = {"ordinary": 1.0, "products that are subnormal": 2.0**-66, "subnormal factors": 2.0**-128}
IN_FEATURES = (1, 2, 63, 576)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("real", marks=pytest.mark.skipif(not ARE_HERE, reason="needs AVX512-BF16")),
        pytest.param("simulated", marks=[pytest.mark.slow, pytest.mark.timeout(BUILD_SECONDS)]),
    ],
)
def pair(request, made_libraries, teams):
    """The kernels of both paths, as a pair."""
    if request.param == "simulated":
        libraries = [made_libraries(f"simulated_{path}") for path in PAIR]
    else:
        libraries = [KernelLibrary(choose_kernels(path).library) for path in PAIR]
    return [teams(library, 1) for library in libraries]


def random(*shape, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(torch.bfloat16)


def of_any_bits(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


def same(left, right):
    """Returns whether all bits are equal; all NaN count as equal."""
    return bool(((bits(left) == bits(right)) | (left.isnan() & right.isnan())).all())


def test_the_pair_is_the_one_that_nodes_take_for_equal():
    assert {PAIR[0]: PAIR[1]} == SAME_BITS


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 12, 30])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_products(pair, rows, scale):
    for in_features in IN_FEATURES:
        x, weight = random(rows, in_features, scale=scale), random(49, in_features, scale=scale)
        # float32 rows also show differences that rounding to bfloat16 would hide.
        for typed in (x, x.float()):
            left, right = (linear(kernels, pack(kernels, [weight]), typed) for kernels in pair)
            assert same(left, right)


def test_products_of_any_bits(pair):
    for in_features in IN_FEATURES:
        x, weight = of_any_bits(30, in_features), of_any_bits(49, in_features)
        left, right = (linear(kernels, pack(kernels, [weight]), x.float()) for kernels in pair)
        assert same(left, right)


def test_a_product_keeps_no_subnormal_number(pair):
    """A comparison of the two paths would not notice if both kept subnormal numbers."""
    x, weight = torch.full((1, 2), 2.0**-70, dtype=torch.bfloat16), torch.full((16, 2), 2.0**-60, dtype=torch.bfloat16)
    for kernels in pair:
        assert bool((linear(kernels, pack(kernels, [weight]), x.float()) == 0).all())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_attention(pair, scale, head_dim):
    num_blocks, length = 20, 300
    keys, values = (random(num_blocks, 16, 2, head_dim, scale=scale) for _ in range(2))
    values = values.flip(0)
    query = random(7, 6, head_dim)
    tables = [list(range(num_blocks))]
    batch = build_input_batch([SequenceRows([0] * 7, length - 7, tables[0], 1)], 16)
    options = AttentionOptions(scaling=head_dim**-0.5)
    left, right = (paged_attention(kernels, query, keys, values, batch, options) for kernels in pair)
    assert same(left, right)


@pytest.mark.parametrize("name", CASES)
def test_experts(pair, name):
    layer = Layer(name)
    left, right = (layer.compute(kernels) for kernels in pair)
    assert same(left, right)


def test_what_is_measured_are_products(pair, monkeypatch):
    """With twenty times as many rows, a measurement takes at least ten times as long, so products dominate it."""

    def shortest():
        product = dot_product_speed._product(pair[1].library, ElementType.BFLOAT16)
        return min(repeat(product, timer=thread_time, number=1, repeat=5))

    few = shortest()
    monkeypatch.setattr(dot_product_speed, "NUM_ROWS", 20 * dot_product_speed.NUM_ROWS)
    assert shortest() > 10 * few


def test_the_ratio_is_the_time_of_bfloat16_over_that_of_float32(pair, monkeypatch):
    """A bfloat16 product is replaced by ten float32 products, so that the ratio does not depend on the processor."""
    product = dot_product_speed._product

    def stand_in(library, dtype):
        one = product(library, ElementType.FLOAT32)
        return one if dtype is ElementType.FLOAT32 else lambda: [one() for _ in range(10)]

    monkeypatch.setattr(dot_product_speed, "_product", stand_in)
    assert 8 < dot_product_speed._dot_product_ratio(pair[0].library) < 12
