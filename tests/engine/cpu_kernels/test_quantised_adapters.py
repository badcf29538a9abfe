"""Adapters (LoRA) on native decoders whose matrices have the formats of quantised checkpoints."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from outrider.engine.arrays import from_bfloat16
from outrider.engine.cpu_kernels.adapter import NativeAdapter
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.low_rank import LowRank
from tests.engine.cpu_kernels.libraries import with_few_for_tests
from tests.engine.cpu_kernels.test_adapters import TABLES, TOKENS, check_bits_in_random_batches, logits_of, runner
from tests.engine.cpu_kernels.test_quantised_decoder import MIXES, SIZES, made_decoder, made_tensors

JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
SIZES_IF_JOINED = {
    **{name: (sum(SIZES[part][0] for part in parts), SIZES[parts[0]][1]) for name, parts in JOINED.items()},
    "mlp.down_proj": SIZES["mlp.down_proj"],
}
VALUE_ONLY = {name: SIZES[name] for name in ("self_attn.v_proj", "mlp.up_proj")}


def made_parts(sizes, seed, rank, layers=(0, 1)):
    random = np.random.default_rng(seed)
    return {
        f"model.layers.{layer}.{name}": LowRank(
            random.normal(0, in_features**-0.5, (rank, in_features)).astype(np.float32),
            random.normal(0, 0.5, (out_features, rank)).astype(np.float32),
        )
        for layer in layers
        for name, (out_features, in_features) in sizes.items()
    }


def plain(tensor):
    if isinstance(tensor, GroupedWeight):
        return tensor.dequantise()
    return from_bfloat16(tensor) if tensor.dtype == np.uint16 else tensor


@pytest.mark.parametrize(
    ("library", "mix"),
    with_few_for_tests({name: (mix,) for name, mix in MIXES.items()}, ("Q4_K_M",)),
    indirect=["library"],
)
def test_rows_with_and_without_adapters_have_the_bits_that_they_have_alone(library, teams, mix):
    decoder, spec = made_decoder(teams(library, 1), made_tensors(mix))
    for sizes in (SIZES_IF_JOINED, VALUE_ONLY):
        parts = made_parts(SIZES, seed=1, rank=5), made_parts(sizes, seed=2, rank=8, layers=(1,))
        of_rows = [None, *(NativeAdapter(decoder.weights.shape, each) for each in parts), None]
        check_bits_in_random_batches(decoder, spec, functools.partial(teams, library), of_rows)


@pytest.mark.parametrize("sizes", [SIZES, SIZES_IF_JOINED, VALUE_ONLY], ids=["parts", "joined", "value"])
@pytest.mark.parametrize(
    ("library", "mix"),
    with_few_for_tests({name: (mix,) for name, mix in MIXES.items()}, ()),
    indirect=["library"],
)
def test_logits_are_near_those_of_merged_weights(library, teams, mix, sizes):
    """Rounding activations to int8 is the only difference."""
    kernels, tensors, parts = teams(library, 1), made_tensors(mix), made_parts(sizes, seed=3, rank=4)
    merged = {name: plain(each) for name, each in tensors.items()}
    for name, part in parts.items():
        layer, names = name.rpartition("layers.")[2][0], JOINED.get(name.split(".", 3)[3])
        places = [f"model.layers.{layer}.{each}.weight" for each in names] if names else [f"{name}.weight"]
        ups = np.split(part.up, np.cumsum([len(merged[place]) for place in places])[:-1])
        for place, up in zip(places, ups, strict=True):
            merged[place] = merged[place] + up @ part.down
    quantised, exact = (made_decoder(kernels, weights, "float32") for weights in (tensors, merged))
    adapter = NativeAdapter(quantised[0].weights.shape, parts)
    found, without, expected = (
        logits_of(runner(*decoder, kernels), (0, len(TOKENS), TABLES[0], of_rows))[0]
        for decoder, of_rows in ((quantised, adapter), (quantised, None), (exact, None))
    )
    differences, changes = ((each - expected).norm(dim=1) / expected.norm(dim=1) for each in (found, without))
    assert differences.median() < 0.05
    assert changes.median() > 4 * differences.median()
