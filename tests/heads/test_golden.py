"""Heads of all published forms and layouts give their owners' logits; unsupported ones are refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_files import CHAINED, EAGLE3, MLP, MTP, NAMES, PARALLEL
from tests.heads.golden_heads import (
    TOLERANCE,
    assert_logits,
    confidences_of,
    logits_of,
    opened,
    rewrite_config,
    rewrite_layer,
    rewrite_tensors,
)

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Endings of the names of tensors that an MTP layer's file repeats from its target. They are not read."""
TAPS = {
    "eagle": (8,),
    **dict.fromkeys(EAGLE3, (2, 4, 5)),
    "eagle3-residual": (1, 4, 6),
    "peagle": (2, 4, 5),
    **dict.fromkeys(["dflash", "dflash-anchor", *CHAINED], (1, 3, 6)),
    **dict.fromkeys([*MLP, *MTP], (2,)),
}
IDS = {"t2d", "d2t", "token_map"}


@pytest.fixture
def unpacked(tmp_path):
    """unpacked(name) returns the golden head of that name."""
    return lambda name: golden_files.unpack(name, tmp_path / name)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def golden(unpacked, name):
    return unpacked(name)


def test_logits_are_those_of_the_owners_code(golden, name):
    assert_logits(logits_of(golden), golden.logits, 1e-4 if name in MLP else TOLERANCE)
    assert opened(golden).spec.max_depth == (len(golden.logits) if name in MLP else None)
    assert name not in MTP or len(golden.logits) == 4


@pytest.mark.parametrize("name", [name for name in CHAINED if name.startswith("dspark")])
def test_confidences_are_those_of_the_owners_code(golden, name):
    assert_logits(confidences_of(golden), golden.confidences)


def test_a_tensor_that_is_changed_changes_logits(golden, name):
    """No tensor is ignored, so the comparison above would notice one that is read wrongly."""
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    kinds, shift, tolerance = {key: [key] for key in whole.keys() - IDS}, 0.0, 1e-2
    if name in MTP:  # each row uses only two experts
        shift, tolerance, kinds = 0.3, 3e-3, {}
        for key in whole:
            if not key.endswith(COPIES):
                kinds.setdefault(re.sub(r"experts\.\d+", "experts", key), []).append(key)
    for kind, keys in kinds.items():
        dim = -1 if name in PARALLEL else 0
        moved = {key: whole[key].roll(1, dims=dim) + (shift or float(whole[key].numel() == 1)) for key in keys}
        save_file(whole | moved, path)
        if kind.startswith("confidence"):
            assert not torch.allclose(confidences_of(golden), golden.confidences, atol=tolerance, rtol=tolerance), kind
        else:
            assert not torch.allclose(logits_of(golden), golden.logits, atol=tolerance, rtol=tolerance), kind


def test_the_reduction_that_the_targets_nodes_read_is_the_heads_own(golden, name):
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert reduction.fingerprint == opened(golden).reduction.fingerprint
    assert reduction.taps == TAPS[name]
    assert reduction.takes_final_norm == (len(TAPS[name]) == 1)
    assert (reduction.projection is not None) == (name not in MTP and not name.startswith("medusa") and name != "eagle")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, "hidden_size") for name in (*MLP, *MTP)),
        *((name, "vocab_size") for name in ("medusa-own-output", "mlp-speculator", "mlp-speculator-tied", *MTP)),
        *((name, "num_hidden_layers") for name in MTP),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_sizes(golden, name, field):
    rewrite_layer(golden.target, **{field: 44})
    said = rf"{field} \d+" if name in MTP else ".*(16|40)"
    with pytest.raises(ConfigError, match=rf"another target: {said} of the head, 44 of the target"):
        opened(golden)


OF_CONFIG = [
    ("eagle3", {"norm_after_fc": True}, "norm_after_fc"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "eagle_aux_hidden_state_layer_ids"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, "eagle_aux_hidden_state_layer_ids"),
    ("eagle3", {"target_hidden_size": 64}, "hidden_size 64 of the head, 32 of the target"),
    ("eagle3", {"transformer_layer_config": {"model_type": "gemma3_text"}}, "transformer_layer_config.model_type"),
    ("dflash", {"mask_token_id": None}, "mask_token_id"),
    ("dflash", {"block_size": None}, "block_size"),
    ("dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    ("dflash", {"markov_gate": True}, "markov_gate"),
    ("dflash", {"dflash_config": {"input_embedding_scale": 45.25}}, "input_embedding_scale is 45.25"),
    ("dflash", {"dflash_config": {"final_logit_softcapping": 30}}, "final_logit_softcapping is 30"),
    ("dflash", {"output_multiplier": 0.5}, "output_multiplier is 0.5"),
    ("dflash", {"speculators_model_type": "xpress"}, "xpress"),
    ("dspark", {"markov_rank": 0}, "markov_rank"),
    ("dspark", {"markov_head_type": "fir"}, "markov_head_type"),
    ("dspark", {"dspark_backbone_conv_enabled": True}, "dspark_backbone_conv_enabled"),
    ("dspark-rnn", {"sample_from_anchor": False}, "markov_head_type is 'rnn'; supported: vanilla, gated"),
    ("dflash2", {"conv_group_size": 7}, "conv_group_size"),
    ("dflash2", {"conv_kernel_size": 5}, "conv_kernel_size"),
    ("dflash2", {"selector_top_k": 97}, "selector_top_k"),
    ("dflash2", {"draft_vocab_size": 48}, "draft_vocab_size"),
    ("medusa-own-output", {"medusa_num_heads": 0}, "medusa_num_heads"),
    ("medusa-own-output", {"residual_multiplier": 0.5}, "residual_multiplier"),
    ("mlp-speculator", {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "architectures"),
    ("mlp-speculator", {"embedding_scale": 2.0}, "embedding_scale"),
]
OF_LAYER = [
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("eagle3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("eagle3", {"vocab_size": 97}, "vocab_size 97 of the head, 96 of the target"),
    ("eagle3", {"is_gated": True}, "is_gated"),
    ("eagle3", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144"),
    ("mtp-glm", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
    ("mtp-qwen", {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers"),
    ("mtp-glm", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("mtp-speculators", {"model_type": "of tomorrow"}, "model_type"),
    ("mtp-speculators", {"layer_types": ["sliding_attention", "sliding_attention"]}, "layer_types"),
    (
        "mtp-speculators",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}},
        "rope_parameters",
    ),
]


@pytest.mark.parametrize(
    ("name", "rewrite", "changes", "named"),
    [
        *((name, rewrite_config, changes, named) for name, changes, named in OF_CONFIG),
        *((name, rewrite_layer, changes, named) for name, changes, named in OF_LAYER),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(golden, rewrite, changes, named):
    rewrite(golden.head, **changes)
    with pytest.raises(ConfigError, match=named):
        opened(golden)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("eagle3", "layers.0.gate.weight"),
        *(
            (name, unknown)
            for name in MLP
            for unknown in (
                *("0.norm.weight", "1.0.gate.weight", "0.7.linear.weight", "speculator.emb.9.weight", "ln0.weight"),
            )
        ),
        ("mtp-glm", "model.layers.2.gate.weight"),
        ("mtp-glm", "model.layers.3.enorm.weight"),
        ("mtp-qwen", "mtp.layers.0.gate.weight"),
        ("mtp-qwen", "mtp.layers.1.input_layernorm.weight"),
        ("mtp-qwen", "mtp.gate.weight"),
        ("mtp-speculators", "mtp_layers.0.gate.weight"),
        ("mtp-speculators", "mtp_layers.1.final_layernorm.weight"),
        ("mtp-speculators", "norm.weight"),
    ],
)
def test_a_tensor_that_is_not_known_is_refused_by_name(golden, unknown):
    rewrite_tensors(golden.head, lambda own: own | {unknown: torch.zeros(3)})
    with pytest.raises(ConfigError, match=re.escape(f"does not know: {unknown}")):
        opened(golden)


@pytest.mark.parametrize(
    ("name", "missing", "named"),
    [
        ("medusa-own-output", "1.1.linear.weight", "1.1.linear.weight"),
        ("mtp-glm", "model.layers.2.eh_proj.weight", "eh_proj"),
        ("mtp-glm", "model.layers.2.self_attn.q_norm.weight", "q_norm"),
        ("mtp-glm", "model.layers.2.mlp.experts.1.up_proj.weight", "up_proj"),
        ("mtp-speculators", "mtp_layers.0.final_layernorm.weight", "final_layernorm"),
    ],
)
def test_a_missing_tensor_is_named(golden, missing, named):
    rewrite_tensors(golden.head, lambda own: {key: own[key] for key in own if key != missing})
    with pytest.raises(ModelError, match=re.escape(named)):
        opened(golden)


@pytest.mark.parametrize("name", ["medusa-own-output", "medusa-truncated", *MTP])
def test_a_whole_target_and_further_heads_are_not_read(golden, name):
    before = opened(golden).spec.fingerprint
    others = {
        "mtp-glm": ["model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.rotary_emb.inv_freq"],
        "mtp-qwen": ["model.language_model.norm.weight", "model.visual.patch.weight", "mtp.embed_tokens.weight"],
        "mtp-speculators": ["embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq", "verifier_lm_head.weight"],
    }.get(name, ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "9.0.linear.weight", "lm_heads.9.weight"])
    rewrite_tensors(golden.head, lambda own: own | {other: torch.full((3,), torch.nan) for other in others})
    assert_logits(logits_of(golden), golden.logits, 1e-4 if name in MLP else TOLERANCE)
    assert opened(golden).spec.fingerprint == before, "only its own tensors are read for it"
