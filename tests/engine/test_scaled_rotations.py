"""Rotations by a config.json are those of transformers, for every kind of scaling and every age of the file."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.cpu_kernels.decoder_options import FAMILIES, decoder_options
from outrider.engine.scaled_rotations import make_rotation, rope_parameters
from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import own_rotations

WINDOW, ORIGINAL, HEAD_DIM = 4096, 1024, 32
LONG = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
KINDS = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn without truncation": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24, "truncate": False},
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with a scale": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "longrope": LONG,
    "longrope of a part": {"rope_type": "longrope", "partial_rotary_factor": 0.5}
    | {name: factors[:8] for name, factors in LONG.items()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_scale_are_those_of_transformers(kind):
    parameters = {
        "rope_type": kind,
        "rope_theta": 50_000.0,
        "original_max_position_embeddings": ORIGINAL,
        **KINDS[kind],
    }
    architecture = "phi3" if "partial_rotary_factor" in parameters else "llama"
    config = AutoConfig.for_model(
        architecture,
        hidden_size=128,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=WINDOW,
        rope_parameters=dict(parameters),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    (found,) = own_rotations(config, decoder_options(config.to_dict())).rotations
    assert found.frequencies.dtype == np.float32
    np.testing.assert_array_equal(found.frequencies, frequencies.numpy())
    assert found.scale == scale


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {}),
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("phi3", {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 512}),
        ("phi3", {"partial_rotary_factor": 0.75, "rope_theta": 20_000.0}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 20_000.0}),
        ("gemma3_text", {"rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 3e5}, "sliding_attention": {}}}),
    ],
)
def test_files_of_older_versions_have_the_parameters_that_transformers_reads_from_them(architecture, settings):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    expected = AutoConfig.for_model(architecture, **sizes | copy.deepcopy(settings)).rope_parameters
    of_family = {name: value for name, value in FAMILIES[architecture].settings.items() if name.startswith("rope")}
    found = rope_parameters({"max_position_embeddings": 4096, **of_family, **settings})
    assert _without_defaults(found) == _without_defaults(expected)


def _without_defaults(parameters):
    """`partial_rotary_factor` is 1 by default. Only transformers needs `original_max_position_embeddings`."""
    if any(isinstance(each, dict) for each in parameters.values()):
        return {name: _without_defaults(each) for name, each in parameters.items()}
    unused = ("type", "original_max_position_embeddings")
    return {
        name: value
        for name, value in parameters.items()
        if name not in unused and (name, value) != ("partial_rotary_factor", 1.0)
    }


def test_unknown_rotations_are_refused():
    with pytest.raises(ModelError, match="of the kind 'spiral' are not supported"):
        make_rotation({"rope_type": "spiral", "rope_theta": 1e4}, HEAD_DIM)
