"""EAGLE: logits of SafeAILab, in its own layout and in that of speculators; what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.heads.checkpoint import Target
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import NUM_LAYERS, assert_logits, logits_of, opened, rewrite_config, rewrite_tensors


@pytest.fixture
def golden(tmp_path):
    return golden_files.unpack("eagle", tmp_path)


def nest(folder):
    """From SafeAILab's layout to speculators', which has one layer."""
    flat = json.loads((folder / "config.json").read_text())
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    (folder / "config.json").write_text(json.dumps(config | {"transformer_layer_config": flat}))
    names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}

    def renamed(own):
        for old, new in names.items():
            own = {name.replace(old, new): value for name, value in own.items()}
        return {name: value for name, value in own.items() if not name.startswith("layers.1.")}

    rewrite_tensors(folder, renamed)


def test_logits_after_true_features_and_own_states_are_the_owners(golden):
    assert_logits(logits_of(golden), golden.logits)


def test_a_tensor_that_is_changed_changes_logits(golden):
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    for key in whole:
        save_file(whole | {key: whole[key].roll(1, dims=0)}, path)
        assert not torch.allclose(logits_of(golden), golden.logits, atol=1e-2, rtol=1e-2), key


def test_the_nested_layout_gives_what_one_layer_of_the_flat_one_does(golden):
    rewrite_config(golden.head, num_hidden_layers=1)
    whole = load_file(golden.head / "model.safetensors")
    save_file({key: whole[key] for key in whole if "layers.1." not in key}, golden.head / "model.safetensors")
    expected = logits_of(golden)
    rewrite_config(golden.head, num_hidden_layers=5)  # the target's, which this layout keeps
    nest(golden.head)
    assert_logits(logits_of(golden), expected)
    assert opened(golden).spec.num_layers == 1


def test_features_are_the_targets_last_hidden_states_behind_its_final_norm(golden):
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert (reduction.taps, reduction.takes_final_norm, reduction.projection) == ((NUM_LAYERS,), True, None)
    assert reduction.fingerprint == opened(golden).reduction.fingerprint


def test_norms_that_are_not_known_are_refused_by_name(golden):
    nest(golden.head)
    rewrite_config(golden.head, layernorms=True)
    with pytest.raises(ConfigError, match="layernorms"):
        opened(golden)
