"""MTP: logits of the owners' code, in each layout that is published; what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.attention.base import AttentionOptions
from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.forms.mtp import _attention_by
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import opened, rewrite_tensors

NAMES = ["mtp-glm", "mtp-speculators", "mtp-qwen"]


def logits_of(golden):
    with torch.inference_mode():
        return golden_files.logits_of(opened(golden), golden.token_ids, golden.taps)


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    nested = config.get("transformer_layer_config") or config.get("text_config") or config
    nested |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_owners_code(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    assert len(golden.logits) == 4
    torch.testing.assert_close(logits_of(golden), golden.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_changed_changes_logits(name, tmp_path):
    """But for the copies of what the target has itself, which are not read."""
    golden = golden_files.unpack(name, tmp_path)
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    copies = {key for key in whole if key.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    alike = {
        key: re.sub(r"experts\.\d+", "experts", key) for key in whole.keys() - copies
    }  # a row asks two experts only
    for kind in sorted(set(alike.values())):
        changed = {key: whole[key].roll(1, dims=0) + 0.3 for key, own in alike.items() if own == kind}
        save_file(whole | changed, path)
        assert (logits_of(golden) - golden.logits).abs().max() > 3e-3, kind


@pytest.mark.parametrize("name", NAMES)
def test_the_head_reads_the_targets_last_hidden_state_behind_its_norm(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert (reduction.taps, reduction.takes_final_norm, reduction.projection) == ((2,), True, None)
    assert reduction.fingerprint == opened(golden).reduction.fingerprint


def test_the_heads_folder_may_be_the_targets(tmp_path):
    golden = golden_files.unpack("mtp-glm", tmp_path)
    rewrite_tensors(golden.head, lambda tensors: tensors | load_file(golden.target / "model.safetensors"))
    golden = golden._replace(target=golden.head)
    torch.testing.assert_close(logits_of(golden), golden.logits, atol=1e-3, rtol=1e-3)
    before = opened(golden).spec.fingerprint
    rewrite_tensors(golden.head, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2})
    assert opened(golden).spec.fingerprint == before, "only its own tensors are read for it"
    rewrite_tensors(
        golden.head, lambda tensors: {name: tensor + name.endswith("hnorm.weight") for name, tensor in tensors.items()}
    )
    assert opened(golden).spec.fingerprint != before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_head_of_another_target_is_refused_with_both_sizes(name, field, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_config(golden.target, **{field: 44})
    with pytest.raises(ConfigError, match=rf"another target: {field} \d+ of the head, 44 of the target"):
        opened(golden)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mtp-glm", "num_nextn_predict_layers", 2),
        ("mtp-qwen", "mtp_num_hidden_layers", 3),
        ("mtp-glm", "kv_lora_rank", 512),
        ("mtp-glm", "quantization_config", {"quant_method": "fp8"}),
        ("mtp-speculators", "model_type", "of tomorrow"),
        ("mtp-speculators", "layer_types", ["sliding_attention", "sliding_attention"]),
        ("mtp-speculators", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(name, field, value, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_config(golden.head, **{field: value})
    with pytest.raises(ConfigError, match=field):
        opened(golden)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mtp-glm", "model.layers.2.eh_proj.weight"),
        ("mtp-glm", "model.layers.2.self_attn.q_norm.weight"),
        ("mtp-glm", "model.layers.2.mlp.experts.1.up_proj.weight"),
        ("mtp-speculators", "mtp_layers.0.final_layernorm.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, missing, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_tensors(golden.head, lambda tensors: {k: v for k, v in tensors.items() if k != missing})
    with pytest.raises(ModelError, match=missing.split(".")[-2]):
        opened(golden)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(8, {"sliding_window": 4}), (8, {"softcap": 30.0}), (6, {})],
)
def test_attention_that_the_heads_cache_does_not_compute_is_refused(head_dim, options):
    rows = torch.zeros(1, 2, 8)
    with pytest.raises(ConfigError, match="which is not supported"):
        _attention_by(lambda *_: rows)(0, rows, rows, rows[..., :head_dim], AttentionOptions(1.0, **options), {})


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
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
def test_a_tensor_that_is_not_known_is_refused_by_name(name, unknown, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_tensors(golden.head, lambda own: own | {unknown: torch.zeros(3)})
    with pytest.raises(ConfigError, match=re.escape(f"does not know: {unknown}")):
        opened(golden)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_target_and_buffers_beside_the_layer_are_not_read(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    others = {
        "mtp-glm": ["model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.rotary_emb.inv_freq"],
        "mtp-qwen": ["model.language_model.norm.weight", "model.visual.patch.weight", "mtp.embed_tokens.weight"],
        "mtp-speculators": ["embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq", "verifier_lm_head.weight"],
    }[name]
    rewrite_tensors(golden.head, lambda own: own | {other: torch.full((3,), torch.nan) for other in others})
    torch.testing.assert_close(logits_of(golden), golden.logits, atol=1e-3, rtol=1e-3)
