"""Every attention backend that computes latent attention, against attention over the expanded keys in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.engine.attention import AttentionOptions, make_attention_backend
from outrider.errors import ConfigError
from tests.contract.test_attention_backends import BACKENDS, BATCHES, TREES, assert_equal, backend, run

__all__ = ["backend"]  # a fixture

LATENT_BACKENDS = {"torch_sdpa", "native"}
LATENT = AttentionOptions(0.25, latent_dim=32)


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.values[0][0] in LATENT_BACKENDS], indirect=True)
@pytest.mark.parametrize("sequences", [BATCHES["row_counts_mixed"], TREES["among_others"], TREES["behind_a_chunk"]])
@pytest.mark.parametrize("options", [LATENT, replace(LATENT, sliding_window=30, softcap=1.5)])
def test_latents_are_keys_and_values(backend, sequences, options):
    assert_equal(run(backend, sequences, options, num_heads=9, num_kv_heads=1, head_dim=48), backend)


def test_latent_attention_has_its_own_backend(monkeypatch):
    monkeypatch.setattr("outrider.engine.attention.why_no_triton", lambda _device: "")
    assert make_attention_backend("auto", "cpu", "bfloat16", latent_dim=32).name == "torch_sdpa"
    for name in ("triton", "varlen_attn"):
        with pytest.raises(ConfigError, match=f"{name} does not compute latent attention: use auto or torch_sdpa"):
            make_attention_backend(name, "cpu", "bfloat16", latent_dim=32)
