"""Heads of the EAGLE family: one head in each of its layouts, and what its files may lack."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from tests.heads import golden_files
from tests.heads.golden_files import PARALLEL
from tests.heads.golden_heads import (
    assert_logits,
    logits_of,
    opened,
    rewrite_config,
    rewrite_tensors,
)


@pytest.fixture
def unpacked(tmp_path):
    """unpacked(name) returns the golden head of that name."""
    return lambda name: golden_files.unpack(name, tmp_path / name)


@pytest.fixture
def eagle(unpacked):
    return unpacked("eagle")


@pytest.fixture
def plain(unpacked):
    return unpacked("eagle3")


def nest(folder):
    """Converts SafeAILab's layout to speculators', which has one layer."""
    flat = json.loads((folder / "config.json").read_text())
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    (folder / "config.json").write_text(json.dumps(config | {"transformer_layer_config": flat}))
    names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}

    def renamed(own):
        for old, new in names.items():
            own = {name.replace(old, new): value for name, value in own.items()}
        return {name: value for name, value in own.items() if not name.startswith("layers.1.")}

    rewrite_tensors(folder, renamed)


def flatten(folder, *, keep=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")):
    """Converts speculators' layout to SpecForge's."""
    nested = json.loads((folder / "config.json").read_text())
    layer = nested["transformer_layer_config"] | {key: nested[key] for key in keep}
    ids = nested["eagle_aux_hidden_state_layer_ids"]
    if ids is not None:
        layer["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in ids]}
    (folder / "config.json").write_text(json.dumps(layer | {"architectures": ["LlamaForCausalLMEagle3"]}))
    rewrite_tensors(folder, lambda own: {name.replace("layers.0.", "midlayer."): own[name] for name in own})


FLAT_KINDS = {
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}


def flatten_parallel(folder):
    """Converts speculators' layout to that of z-lab, DeepSpec or SpecForge."""
    nested = json.loads((folder / "config.json").read_text())
    form = nested["speculators_model_type"]
    flat = nested["transformer_layer_config"] | {
        "architectures": [FLAT_KINDS[form]],
        "draft_vocab_size": nested["draft_vocab_size"],
    }
    if form == "peagle":
        taps = [tap - 1 for tap in nested["eagle_aux_hidden_state_layer_ids"]]
        flat |= {key: nested[key] for key in ("mask_token_id", "norm_before_residual", "speculators_config")}
        flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    else:
        flat["block_size"] = nested["block_size"]
        kept = ("mask_token_id", "sample_from_anchor", "markov_", "enable_", "confidence_", "conv_", "selector_")
        own = {key: value for key, value in nested.items() if key.startswith(kept)}
        own["target_layer_ids"] = [tap - 1 for tap in nested["aux_hidden_state_layer_ids"]]
        flat |= own if form == "dspark" else {"dflash_config": own}
    (folder / "config.json").write_text(json.dumps(flat))


def test_the_nested_layout_gives_what_one_layer_of_the_flat_one_does(eagle):
    rewrite_config(eagle.head, num_hidden_layers=1)
    whole = load_file(eagle.head / "model.safetensors")
    save_file({key: whole[key] for key in whole if "layers.1." not in key}, eagle.head / "model.safetensors")
    expected = logits_of(eagle)
    rewrite_config(eagle.head, num_hidden_layers=5)  # the target's number, which the nested layout keeps
    nest(eagle.head)
    assert_logits(logits_of(eagle), expected)
    assert opened(eagle).spec.num_layers == 1


@pytest.mark.parametrize(
    ("name", "flattened"),
    [
        *((name, flatten) for name in ("eagle3", "eagle3-residual", "eagle3.1")),
        *((name, flatten_parallel) for name in PARALLEL),
    ],
)
def test_the_flat_layout_gives_the_same(unpacked, name, flattened):
    golden = unpacked(name)
    flattened(golden.head)
    assert_logits(logits_of(golden), golden.logits)


def test_what_the_head_does_not_have_is_the_targets(plain):
    own = load_file(plain.head / "model.safetensors")
    embedding, rows = own.pop("embed_tokens.weight"), own.pop("lm_head.weight")
    output = torch.randn(embedding.shape, dtype=rows.dtype)
    output[own["t2d"]] = rows
    save_file(own, plain.head / "model.safetensors")
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": output}, plain.target / "model.safetensors")
    assert_logits(logits_of(plain), plain.logits)


def test_numbers_that_change_nothing_are_no_reason_to_refuse(unpacked):
    dflash = unpacked("dflash")
    rewrite_config(dflash.head, input_embedding_scale=1.0, initializer_factor=0.5, logit_cap=0, max_window_layers=36)
    opened(dflash)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_what_is_not_known_of_the_flat_layout_is_refused_by_name(plain, changes, named):
    flatten(plain.head)
    rewrite_config(plain.head, **changes)
    with pytest.raises(ConfigError, match=named):
        opened(plain)


def test_weights_in_another_format_are_named(plain):
    (plain.head / "model.safetensors").rename(plain.head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no tensor .*safetensors"):
        opened(plain)
