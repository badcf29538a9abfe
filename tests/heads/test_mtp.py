"""MTP: a head may be in its target's own folder, and attention that the head's cache cannot compute is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.attention.base import AttentionOptions
from outrider.errors import ConfigError
from outrider.heads.forms.mtp import _attention_by
from tests.heads import golden_files
from tests.heads.golden_heads import assert_logits, logits_of, opened, rewrite_tensors


def test_the_heads_folder_may_be_the_targets(tmp_path):
    golden = golden_files.unpack("mtp-glm", tmp_path)
    rewrite_tensors(golden.head, lambda tensors: tensors | load_file(golden.target / "model.safetensors"))
    golden = golden._replace(target=golden.head)
    assert_logits(logits_of(golden), golden.logits)
    before = opened(golden).spec.fingerprint
    rewrite_tensors(golden.head, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2})
    assert opened(golden).spec.fingerprint == before, "only its own tensors are read for it"
    rewrite_tensors(
        golden.head, lambda tensors: {name: tensor + name.endswith("hnorm.weight") for name, tensor in tensors.items()}
    )
    assert opened(golden).spec.fingerprint != before


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(8, {"sliding_window": 4}), (8, {"softcap": 30.0}), (8, {"sinks": torch.zeros(2)}), (6, {})],
)
def test_attention_that_the_heads_cache_does_not_compute_is_refused(head_dim, options):
    rows = torch.zeros(1, 2, 8)
    with pytest.raises(ConfigError, match="which is not supported"):
        _attention_by(lambda *_: rows)(0, rows, rows, rows[..., :head_dim], AttentionOptions(1.0, **options), {})
