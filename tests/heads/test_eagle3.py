"""EAGLE-3: logits of speculators 0.9.0 and SafeAILab, in the nested layout and the flat one; what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import NUM_LAYERS, assert_logits, logits_of, opened, rewrite_config, rewrite_tensors

CPU = torch.device("cpu")
NAMES = ["eagle3", "eagle3-residual", "eagle3.1", "eagle3-flat"]


@pytest.fixture(params=NAMES)
def golden(request, tmp_path):
    return golden_files.unpack(request.param, tmp_path)


@pytest.fixture
def plain(tmp_path):
    return golden_files.unpack("eagle3", tmp_path)


def flatten(folder, *, keep=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")):
    """From speculators' layout to SpecForge's."""
    nested = json.loads((folder / "config.json").read_text())
    layer = nested["transformer_layer_config"] | {key: nested[key] for key in keep}
    ids = nested["eagle_aux_hidden_state_layer_ids"]
    if ids is not None:
        layer["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in ids]}
    (folder / "config.json").write_text(json.dumps(layer | {"architectures": ["LlamaForCausalLMEagle3"]}))
    rewrite_tensors(folder, lambda own: {name.replace("layers.0.", "midlayer."): own[name] for name in own})


def test_logits_after_true_features_and_own_states_are_the_owners(golden):
    assert_logits(logits_of(golden), golden.logits)


def test_the_flat_layout_gives_the_same(golden):
    if "transformer_layer_config" in (golden.head / "config.json").read_text():
        flatten(golden.head)
    assert_logits(logits_of(golden), golden.logits)


def test_a_tensor_that_is_changed_changes_logits(golden):
    """Nothing in the files is ignored; so the comparison above would see it read wrongly."""
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    for key in whole.keys() - {"t2d", "d2t"}:
        save_file(whole | {key: whole[key].roll(1, dims=0)}, path)
        assert not torch.allclose(logits_of(golden), golden.logits, atol=1e-2, rtol=1e-2), key


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flag_that_is_turned_changes_logits(golden, flag):
    config = json.loads((golden.head / "config.json").read_text())
    rewrite_config(golden.head, **{flag: not config.get(flag)})
    assert not torch.allclose(logits_of(golden), golden.logits, atol=1e-2, rtol=1e-2)


def test_taps_are_those_of_the_configuration_or_the_owners_default(tmp_path):
    taps = {name: opened(golden_files.unpack(name, tmp_path / name)).reduction.taps for name in NAMES}
    assert taps == {"eagle3": (2, 4, 5), "eagle3-residual": (1, 4, 6), "eagle3.1": (2, 4, 5), "eagle3-flat": (2, 4, 5)}


def test_the_reduction_that_the_targets_nodes_read_is_the_heads_own(golden):
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert reduction.fingerprint == opened(golden).reduction.fingerprint


def test_draft_ids_are_the_targets_that_the_mask_allows(plain):
    mask = load_file(plain.head / "model.safetensors")["t2d"]
    assert opened(plain).target_ids.tolist() == mask.nonzero().flatten().tolist()


def test_what_the_head_does_not_have_is_the_targets(plain):
    own = load_file(plain.head / "model.safetensors")
    embedding, rows = own.pop("embed_tokens.weight"), own.pop("lm_head.weight")
    output = torch.randn(embedding.shape, dtype=rows.dtype)
    output[own["t2d"]] = rows
    save_file(own, plain.head / "model.safetensors")
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": output}, plain.target / "model.safetensors")
    assert_logits(logits_of(plain), plain.logits)


def test_rows_of_several_forwards_are_those_of_one(plain):
    """A row's hidden state depends on rows before it alone."""
    head = opened(plain)
    layers = plain.taps.view(len(plain.taps), NUM_LAYERS + 1, -1)
    features = head.reduction.to(CPU, torch.float32)(layers[:, head.reduction.taps].flatten(1))
    hidden = {}
    for parts in ([0, 11], [0, 1, 4, 11]):
        attend = golden_files.DenseAttention()
        hidden[len(parts)] = torch.cat(
            [
                head.forward(golden_files.true_rows(plain.token_ids, features, start, end), attend)
                for start, end in itertools.pairwise(parts)
            ]
        )
    torch.testing.assert_close(hidden[2], hidden[4])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_after_fc": True}, "norm_after_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, "eagle_aux_hidden_state_layer_ids"),
        ({"target_hidden_size": 64}, "hidden_size 64 of the head, 32 of the target"),
        ({"transformer_layer_config": {"model_type": "gemma3_text"}}, "transformer_layer_config.model_type"),
        ({"speculators_model_type": "dspark"}, "dspark"),
    ],
)
def test_what_is_not_known_is_refused_by_name(plain, changes, named):
    rewrite_config(plain.head, **changes)
    with pytest.raises(ConfigError, match=named):
        opened(plain)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"vocab_size": 97}, "vocab_size 97 of the head, 96 of the target"),
        ({"is_gated": True}, "is_gated"),
        ({"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144"),
    ],
)
def test_a_layer_that_is_not_known_is_refused_by_name(plain, changes, named):
    config = json.loads((plain.head / "config.json").read_text())
    rewrite_config(plain.head, transformer_layer_config=config["transformer_layer_config"] | changes)
    with pytest.raises(ConfigError, match=named):
        opened(plain)


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


def test_a_tensor_that_no_option_explains_is_refused_by_name(plain):
    rewrite_tensors(plain.head, lambda own: own | {"layers.0.gate.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"layers\.0\.gate\.weight"):
        opened(plain)


def test_weights_in_another_format_are_named(plain):
    (plain.head / "model.safetensors").rename(plain.head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no tensor .*safetensors"):
        opened(plain)


def test_draft_ids_outside_the_targets_vocabulary_are_refused(plain):
    rewrite_tensors(plain.head, lambda own: own | {"d2t": own["d2t"] + 60})
    with pytest.raises(ModelError, match="d2t"):
        opened(plain)
