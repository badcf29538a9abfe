"""Options by a config.json, and packing by them without torch: the same as by a model of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.decoder_options import FAMILIES, decoder_options
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import own_rotations
from outrider.model_hub.safetensors_files import SafetensorsFiles
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.engine.cpu_kernels import families
from tests.support.packed_decoder import pack_decoder
from tests.support.processes import run_python
from tests.support.tiny_model import make_tiny_model

LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32}
STATED = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
"""Settings that all files have."""


def test_every_family_is_tested():
    assert set(families.FAMILIES) == set(FAMILIES)


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path):
    settings = {name: value for name, value in (families.SHAPE | families.FAMILIES[request.param]).items() if value}
    return make_tiny_model(tmp_path, architecture=request.param, overrides=settings)


def test_weights_are_packed_the_same_with_and_without_torch(checkpoint, portable_library, teams):
    kernels = teams(portable_library, 1)
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    spec, _ = describe_decoder(model, dtype="bfloat16", window=resolve_window(model.config))
    options = own_rotations(model.config, decoder_options(json.loads((checkpoint / "config.json").read_text())))
    assert options.spec(dtype="bfloat16", max_model_len=spec.max_model_len) == spec
    found = pack_weights(kernels, options, spec, SafetensorsFiles(checkpoint))  # from float32
    expected = pack_decoder(kernels, model, spec)
    assert found.shape == expected.shape
    assert found.blobs.keys() == expected.blobs.keys()
    assert [name for name in found.blobs if not np.array_equal(found.blobs[name], expected.blobs[name])] == []


def test_the_options_need_no_torch():
    ran = run_python(
        "-c",
        "import sys; from outrider.engine.cpu_kernels.packing import pack_weights; "
        "assert not {'torch', 'transformers'} & set(sys.modules)",
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_are_those_of_transformers(family):
    """Old files lack settings that equal the defaults."""
    config = AutoConfig.for_model(family, **LARGE, **STATED)
    found = decoder_options({"model_type": family, "vocab_size": config.vocab_size, **LARGE, **STATED})
    expected = decoder_options(config.to_dict())
    assert found.shape == expected.shape
    assert (found.vocab_size, found.is_tied) == (expected.vocab_size, expected.is_tied)
    for ours, theirs in zip(found.rotations, expected.rotations, strict=True):
        assert np.array_equal(ours.frequencies, theirs.frequencies)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "mixtral"}, "mixtral is none of the native decoder's families"),
        ({"hidden_act": "relu"}, "its activation is relu"),
        ({"hidden_size": 4100, "head_dim": 128}, "its widths .* are not multiples of 32"),
        ({"head_dim": 40}, "its heads have 40 dimensions, not a multiple of 16"),
        ({"intermediate_size": None}, "its config.json has no intermediate_size"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rotations .* of the kind 'spiral'"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 8}, "its layer_types .* are not one of"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "its layer_types .* are not one of"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {}}}, "no rotation for sliding_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "it attends in two directions"),
    ],
)
def test_what_the_decoder_cannot_compute_is_named(settings, reason):
    found = decoder_options({"model_type": "llama", "vocab_size": 100, **LARGE, **settings})
    with pytest.raises(ModelError, match=reason):
        raise ModelError(found)


def test_a_missing_tensor_is_named(checkpoint, portable_library, teams):
    options = decoder_options(json.loads((checkpoint / "config.json").read_text()))
    tensors = {name: value for name, value in SafetensorsFiles(checkpoint).items() if "1.mlp.down_proj" not in name}
    spec = options.spec(dtype="float32", max_model_len=64)
    with pytest.raises(ModelError, match=r"lack 'model.layers.1.mlp.down_proj.weight'"):
        pack_weights(teams(portable_library, 1), options, spec, tensors)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": [1]},
        {"num_attention_heads": 0},
        {"num_attention_heads": "2"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_an_unusual_configuration_is_left_to_transformers(change):
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 1e4}
    assert not isinstance(decoder_options(config), str)
    assert isinstance(decoder_options(config | change), str)
