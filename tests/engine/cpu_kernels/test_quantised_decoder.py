"""Native decoders whose matrices have the formats of quantised checkpoints, mixed within a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.engine.arrays import to_bfloat16
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_options import DecoderOptions, decoder_options
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.engine.model_spec import ModelSpec
from tests.engine.cpu_kernels.grouped_weights import random_weight
from tests.engine.cpu_kernels.libraries import with_few_for_tests
from tests.engine.cpu_kernels.test_native_decoder import PROMPTS, Engine, logits_alone, rows_that_differ

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 331
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SIZES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
# By the last part of a matrix's name; "" is that of all others, and of the output layer.
MIXES = {
    "Q4_K_M": {"": "Q4_K", "self_attn.v_proj": "Q6_K", "mlp.down_proj": "Q6_K", "head": "Q6_K"},
    "Q5_0 and Q8_0": {"": "Q5_1", "self_attn.v_proj": "Q8_0", "mlp.gate_proj": "Q8_0", "head": "Q8_0"},
    "AWQ": {"": "AWQ", "head": "bfloat16"},
    "plain value": {"": "Q4_0", "self_attn.v_proj": "bfloat16", "self_attn.o_proj": "bfloat16"},
    "plain query": {"": "bfloat16", "self_attn.v_proj": "Q8_0"},
}


def made_tensors(mix):
    def made(name, sizes, seed):
        kind = mix.get(name, mix[""])
        if kind == "bfloat16":
            return to_bfloat16(np.random.default_rng(seed).normal(0, 0.06, sizes).astype(np.float32))
        weight = random_weight(kind, *sizes, seed=seed)
        scale = np.float16(0.06 / weight.dequantise().std())  # like those of a trained model
        return GroupedWeight(
            weight.codes,
            weight.group_size,
            *(
                None if part is None else replace(part, units=part.units * scale)
                for part in (weight.scales, weight.minima)
            ),
        )

    tensors = {"model.embed_tokens.weight": made("head", (VOCAB, HIDDEN), 99)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for index, (name, sizes) in enumerate(SIZES.items()):
            tensors[f"{prefix}{name}.weight"] = made(name, sizes, 10 * layer + index)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors


def made_decoder(kernels, tensors, dtype="bfloat16"):
    options = decoder_options(CONFIG)
    assert isinstance(options, DecoderOptions), options
    spec = ModelSpec(
        architecture="LlamaForCausalLM", num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        vocab_size=VOCAB, max_model_len=512, dtype=dtype,
    )  # fmt: skip
    return NativeDecoder(kernels, pack_weights(kernels, options, spec, tensors)), spec


@pytest.mark.parametrize(
    ("library", "mix"),
    with_few_for_tests({name: (mix,) for name, mix in MIXES.items()}, ("Q4_K_M",)),
    indirect=["library"],
)
def test_a_tokens_logits_have_the_same_bits_in_any_schedule(library, teams, mix):
    decoder, spec = made_decoder(teams(library, 1), made_tensors(mix))
    alone = logits_alone(decoder, spec, teams(library, 1))
    for num_threads in (1, 3):
        assert rows_that_differ(alone, decoder, spec, teams(library, num_threads), seed=num_threads) == []


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_logits_are_near_those_of_the_dequantised_weights(library, teams, mix):
    """Rounding activations to int8 is the only difference."""
    kernels, tensors = teams(library, 1), made_tensors(mix)
    plain = {name: each.dequantise() if isinstance(each, GroupedWeight) else each for name, each in tensors.items()}
    found, expected = (
        Engine(*made_decoder(kernels, weights, "float32"), kernels, PROMPTS[2:]).run([(0, 70, [])])[0]
        for weights in (tensors, plain)
    )
    differences = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < differences.median() < 0.04  # single rows differ more where attention is nearly a tie


def test_a_value_projection_of_its_own_computes_what_a_joint_one_does(library, teams, monkeypatch):
    kernels, tensors = teams(library, 1), made_tensors({"": "Q8_0"})
    joint, spec = made_decoder(kernels, tensors)
    monkeypatch.setattr("outrider.engine.cpu_kernels.packing.have_one_format", lambda _: False)
    apart, _ = made_decoder(kernels, tensors)
    assert "1.value.packed" in apart.weights.blobs
    assert "1.value.packed" not in joint.weights.blobs
    found = [Engine(decoder, spec, kernels, PROMPTS).run([(0, 50, []), (2, 9, [])]) for decoder in (joint, apart)]
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
