"""P-EAGLE and DFlash: a block's logits are those of speculators 0.9.0, in each layout; what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.heads.checkpoint import Target
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import assert_logits, block_logits_of, opened, rewrite_config

NAMES = ["peagle", "dflash", "dflash-anchor"]
MASK = 7


@pytest.fixture(params=NAMES)
def golden(request, tmp_path):
    return golden_files.unpack(request.param, tmp_path)


@pytest.fixture
def dflash(tmp_path):
    return golden_files.unpack("dflash", tmp_path)


def flatten(folder):
    """From speculators' layout to z-lab's or SpecForge's."""
    nested = json.loads((folder / "config.json").read_text())
    kind = {"peagle": "PEagleDraftModel", "dflash": "DFlashDraftModel"}[nested["speculators_model_type"]]
    flat = nested["transformer_layer_config"] | {
        "architectures": [kind],
        "draft_vocab_size": nested["draft_vocab_size"],
    }
    if kind == "PEagleDraftModel":
        taps = [tap - 1 for tap in nested["eagle_aux_hidden_state_layer_ids"]]
        flat |= {key: nested[key] for key in ("mask_token_id", "norm_before_residual", "speculators_config")}
        flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    else:
        flat["block_size"] = nested["block_size"]
        flat["dflash_config"] = {key: nested[key] for key in ("mask_token_id", "sample_from_anchor")} | {
            "target_layer_ids": [tap - 1 for tap in nested["aux_hidden_state_layer_ids"]]
        }
    (folder / "config.json").write_text(json.dumps(flat))


@pytest.mark.parametrize("known_before", [0, 6, 10])
def test_logits_of_a_block_are_the_owners(golden, known_before):
    assert_logits(block_logits_of(golden, known_before=known_before), golden.logits)


def test_the_flat_layouts_give_the_same(golden):
    flatten(golden.head)
    assert_logits(block_logits_of(golden), golden.logits)


def test_a_tensor_that_is_changed_changes_logits(golden):
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    for key in whole.keys() - {"t2d", "d2t"}:
        save_file(whole | {key: whole[key].roll(1, dims=-1)}, path)
        assert not torch.allclose(block_logits_of(golden), golden.logits, atol=1e-2, rtol=1e-2), key


def test_the_reduction_that_the_targets_nodes_read_is_the_heads_own(golden):
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert reduction.fingerprint == opened(golden).reduction.fingerprint


def test_a_block_is_masks_and_where_rows_see_each_other_the_newest_token_before_them(tmp_path):
    heads = {name: opened(golden_files.unpack(name, tmp_path / name)) for name in NAMES}
    assert {
        name: (head.spec.parallel_tokens(5), head.spec.num_parallel, head.spec.attends_both_ways)
        for name, head in heads.items()
    } == {
        "peagle": ((MASK, MASK), 3, False),
        "dflash": ((5, MASK, MASK, MASK), 3, True),
        "dflash-anchor": ((5, MASK, MASK), 3, True),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"markov_gate": True}, "markov_gate"),
        ({"dflash_config": {"input_embedding_scale": 45.25}}, "input_embedding_scale is 45.25"),
        ({"dflash_config": {"final_logit_softcapping": 30}}, "final_logit_softcapping is 30"),
        ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
    ],
)
def test_what_is_not_known_is_refused_by_name(dflash, changes, named):
    rewrite_config(dflash.head, **changes)
    with pytest.raises(ConfigError, match=named):
        opened(dflash)


def test_numbers_that_change_nothing_are_no_reason_to_refuse(dflash):
    rewrite_config(dflash.head, input_embedding_scale=1.0, initializer_factor=0.5, logit_cap=0, max_window_layers=36)
    opened(dflash)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "xpress"])
def test_relatives_of_dflash_are_refused_by_name(dflash, kind):
    rewrite_config(dflash.head, speculators_model_type=kind)
    with pytest.raises(ConfigError, match=kind):
        opened(dflash)
