"""Medusa and MLPSpeculator: logits of their owners' formulas, in each layout that is published; what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.open import read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import opened, rewrite_config, rewrite_tensors

NAMES = [
    *("medusa-own-output", "medusa-targets-output", "medusa-truncated"),
    *("mlp-speculator", "mlp-speculator-tied"),
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_each_depth_are_those_of_the_owners_formulas(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    head = opened(golden)
    found = golden_files.logits_of(head, golden.token_ids, golden.taps)
    assert head.spec.max_depth == len(golden.logits)
    torch.testing.assert_close(found, golden.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_changed_changes_logits(name, tmp_path):
    """Nothing in the files is ignored; so the comparison above would see it read wrongly."""
    golden = golden_files.unpack(name, tmp_path)
    path = golden.head / "model.safetensors"
    whole = load_file(path)
    for key in whole.keys() - {"token_map"}:
        save_file(whole | {key: whole[key].roll(1, dims=0)}, path)
        found = golden_files.logits_of(opened(golden), golden.token_ids, golden.taps)
        assert not torch.allclose(found, golden.logits, atol=1e-2, rtol=1e-2), key


@pytest.mark.parametrize("name", NAMES)
def test_the_reduction_that_the_targets_nodes_read_is_the_heads_own(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    reduction = read_reduction(golden.head, Target.open(golden.target))
    assert reduction.fingerprint == opened(golden).reduction.fingerprint
    assert (reduction.taps, reduction.takes_final_norm) == ((2,), True)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_depths_in_one_forward_give_what_they_give_alone(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    head = opened(golden)
    depths = torch.arange(head.spec.max_depth).repeat(2).flip(0)
    states = torch.randn(len(depths), head.spec.width)
    together = head.logits(states, depths)
    for row in range(len(depths)):
        alone = head.logits(states[row : row + 1], depths[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)


def test_logits_of_a_truncated_vocabulary_are_named_by_the_targets_ids(tmp_path):
    golden = golden_files.unpack("medusa-truncated", tmp_path)
    head = opened(golden)
    assert torch.equal(head.target_ids, load_file(golden.head / "model.safetensors")["token_map"])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, "hidden_size") for name in NAMES),
        *((name, "vocab_size") for name in ("medusa-own-output", "mlp-speculator", "mlp-speculator-tied")),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_sizes(name, field, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_config(golden.target, **{field: 44})
    with pytest.raises(ConfigError, match=r"another target: .*(16|40) of the head, 44 of the target"):
        opened(golden)


def test_ids_beyond_the_targets_vocabulary_are_refused(tmp_path):
    golden = golden_files.unpack("medusa-truncated", tmp_path)
    rewrite_tensors(golden.head, lambda tensors: tensors | {"token_map": tensors["token_map"] + 10})
    with pytest.raises(ModelError, match="token_map"):
        opened(golden)


def test_a_truncated_vocabulary_without_its_ids_is_refused(tmp_path):
    golden = golden_files.unpack("medusa-truncated", tmp_path)
    rewrite_tensors(golden.head, lambda tensors: {k: v for k, v in tensors.items() if k != "token_map"})
    with pytest.raises(ConfigError, match="truncated_vocab_size is 12"):
        opened(golden)


def test_weights_in_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    golden = golden_files.unpack("medusa-own-output", tmp_path)
    tensors = load_file(golden.head / "model.safetensors")
    (golden.head / "model.safetensors").unlink()
    torch.save(tensors, golden.head / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="save_file") as error:
        opened(golden)
    with pytest.MonkeyPatch.context() as patch:  # what it says works
        patch.chdir(golden.head)
        exec(error.value.message.split('"')[1])
    torch.testing.assert_close(
        golden_files.logits_of(opened(golden), golden.token_ids, golden.taps), golden.logits, atol=1e-3, rtol=1e-3
    )


def test_a_missing_tensor_is_named(tmp_path):
    golden = golden_files.unpack("medusa-own-output", tmp_path)
    rewrite_tensors(golden.head, lambda tensors: {k: v for k, v in tensors.items() if not k.startswith("1.1.")})
    with pytest.raises(ModelError, match=r"1\.1\.linear\.weight"):
        opened(golden)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("medusa-own-output", "medusa_num_heads", 0),
        ("medusa-own-output", "residual_multiplier", 0.5),
        ("mlp-speculator", "architectures", ["ArcticLSTMSpeculatorPreTrainedModel"]),
        ("mlp-speculator", "embedding_scale", 2.0),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(name, field, value, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    rewrite_config(golden.head, **{field: value})
    with pytest.raises(ConfigError, match=field):
        opened(golden)


@pytest.mark.parametrize("name", ["medusa-own-output", "medusa-truncated"])
def test_a_whole_target_and_further_heads_are_not_read(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    before = opened(golden).spec.fingerprint
    whole = {"model.layers.1.mlp.up_proj.weight": torch.ones(3, 3), "lm_head.weight": torch.ones(40, 16)}
    whole |= {"9.0.linear.weight": torch.ones(3, 3), "lm_heads.9.weight": torch.ones(3, 3)}  # beyond medusa_num_heads
    rewrite_tensors(golden.head, lambda own: own | whole)
    found = golden_files.logits_of(opened(golden), golden.token_ids, golden.taps)
    torch.testing.assert_close(found, golden.logits, atol=1e-4, rtol=1e-4)
    assert opened(golden).spec.fingerprint == before, "only its own tensors are read for it"


def test_copies_of_tied_stages_may_be_stored(tmp_path):
    golden = golden_files.unpack("mlp-speculator-tied", tmp_path)

    def copied(own):
        kinds = ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
        own |= {f"speculator.{kind.format(2)}": own[f"speculator.{kind.format(0)}"].clone() for kind in kinds}
        return own | {"speculator.proj.2.weight": own["speculator.proj.1.weight"].clone()}

    rewrite_tensors(golden.head, copied)
    found = golden_files.logits_of(opened(golden), golden.token_ids, golden.taps)
    torch.testing.assert_close(found, golden.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_not_known_is_refused_by_name(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    for unknown in ("0.norm.weight", "1.0.gate.weight", "0.7.linear.weight", "speculator.emb.9.weight", "ln0.weight"):
        rewrite_tensors(golden.head, lambda own, unknown=unknown: own | {unknown: torch.zeros(3)})
        with pytest.raises(ConfigError, match=f"does not know: .*{unknown}"):
            opened(golden)
