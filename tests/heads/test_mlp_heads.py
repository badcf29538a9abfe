"""Medusa and MLPSpeculator: rows of several depths at once, a truncated vocabulary, and files in other shapes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError, ModelError
from tests.heads import golden_files
from tests.heads.golden_heads import assert_logits, logits_of, opened, rewrite_tensors


@pytest.mark.parametrize("name", golden_files.MLP)
def test_rows_of_several_depths_in_one_forward_give_what_they_give_alone(name, tmp_path):
    golden = golden_files.unpack(name, tmp_path)
    head = opened(golden)
    depths = torch.arange(head.spec.max_depth).repeat(2).flip(0)
    states = torch.randn(len(depths), head.spec.width)
    together = head.logits(states, depths)
    for row in range(len(depths)):
        alone = head.logits(states[row : row + 1], depths[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)


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
    with pytest.MonkeyPatch.context() as patch:  # the command in the message works
        patch.chdir(golden.head)
        exec(error.value.message.split('"')[1])
    assert_logits(logits_of(golden), golden.logits)


def test_copies_of_tied_stages_may_be_stored(tmp_path):
    golden = golden_files.unpack("mlp-speculator-tied", tmp_path)

    def copied(own):
        kinds = ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
        own |= {f"speculator.{kind.format(2)}": own[f"speculator.{kind.format(0)}"].clone() for kind in kinds}
        return own | {"speculator.proj.2.weight": own["speculator.proj.1.weight"].clone()}

    rewrite_tensors(golden.head, copied)
    assert_logits(logits_of(golden), golden.logits, 1e-4)
