from __future__ import annotations

import gguf
import numpy as np
import pytest

from outrider.model_hub.gguf.blocks import FORMATS, decode_rows


def random_rows(kind: gguf.GGMLQuantizationType, rows: int = 5, blocks: int = 3) -> np.ndarray:
    """Returns rows of random blocks whose half-precision factors are finite."""
    made = np.random.default_rng(kind).integers(0, 256, (rows, blocks, FORMATS[kind].block.itemsize), np.uint8)
    for name in {"d", "m"} & set(FORMATS[kind].block.names):
        at = FORMATS[kind].block.fields[name][1]
        made[..., at + 1] &= 0xBF  # no exponent of all ones
    return made.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_every_type_has_the_bits_of_the_gguf_package(kind):
    quantisation = FORMATS[kind]
    assert gguf.GGMLQuantizationType(kind).name == quantisation.name
    assert gguf.GGML_QUANT_SIZES[kind] == (quantisation.block_size, quantisation.block.itemsize)
    rows = random_rows(kind)
    weight = decode_rows(rows, quantisation)
    assert weight.shape == (5, 3 * quantisation.block_size)
    np.testing.assert_array_equal(weight.dequantise(), gguf.dequantize(rows, gguf.GGMLQuantizationType(kind)))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"])
def test_codes_of_four_bits_fit_in_four_bits(name):
    kind = gguf.GGMLQuantizationType[name]
    weight = decode_rows(random_rows(kind), FORMATS[kind])
    low, high = (-8, 7) if weight.minima is None else (0, 15)
    assert low <= weight.codes.min() <= weight.codes.max() <= high
