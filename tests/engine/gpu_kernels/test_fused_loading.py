"""The models that get a fused decoder, and the numerics that their node publishes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from outrider.constraints.grammar import NUMERICS
from outrider.engine.attention import make_attention_backend
from outrider.engine.cpu_kernels.paths import FUSED, TORCH, KernelChoice
from outrider.engine.gpu_kernels import why_not_fused
from outrider.errors import ConfigError
from outrider.model_hub import load
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels
from outrider.model_hub.support import own_logits, probe_token_ids
from tests.support.cached_runner import CachedRunner
from tests.support.interpreted_triton import interpreted_attention
from tests.support.tiny_model import make_tiny_model

fused_decoder = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.fused_decoder")

TOKENS = [(i * 37) % 299 for i in range(20)]


@pytest.fixture(autouse=True)
def _kernels_of_a_gpu(monkeypatch):
    """Chooses a GPU's kernels on this CPU."""
    monkeypatch.setattr(
        load, "choose_model_kernels", lambda *_arguments, **_options: KernelChoice(path=FUSED, library=None)
    )


@pytest.fixture
def checkpoint(tmp_path):
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 96}
    return make_tiny_model(tmp_path / "model", architecture="qwen3", overrides=sizes)


def logits_of(model):
    """Returns the logits of TOKENS: [20, vocab_size]."""
    return CachedRunner(model, num_blocks=5, block_size=4).prefill(TOKENS, range(5))


def test_a_model_of_these_architectures_is_fused_and_checked(checkpoint):
    loaded = load.load_model(ModelConfig(id=str(checkpoint)))
    assert loaded.fused is not None
    assert str(loaded.kernels) == "fused Triton kernels"
    torch.testing.assert_close(logits_of(loaded), logits_of(replace(loaded, fused=None)), rtol=1e-4, atol=1e-4)


def test_a_window_may_be_smaller_than_the_probe(tmp_path):
    path = make_tiny_model(tmp_path / "small", architecture="llama", overrides={"max_position_embeddings": 24})
    assert load.load_model(ModelConfig(id=str(path))).fused is not None


def test_where_kernels_differ_from_transformers_its_modules_compute_and_the_reason_is_told(checkpoint, monkeypatch):
    monkeypatch.setattr(fused_decoder, "activate", lambda gate_up, _activation: gate_up.chunk(2, -1)[0].contiguous())
    loaded = load.load_model(ModelConfig(id=str(checkpoint)))
    assert loaded.fused is None
    assert loaded.kernels.path == TORCH
    assert "the fused kernels' forward differs from the model's own by" in loaded.kernels.reason
    found = logits_of(loaded)
    torch.testing.assert_close(found, logits_of(load.load_model(ModelConfig(id=str(checkpoint)))))
    assert own_logits(loaded.model, probe_token_ids(loaded.spec.vocab_size)).isfinite().all()


def test_other_architectures_stay_with_transformers(tmp_path):
    loaded = load.load_model(ModelConfig(id=str(make_tiny_model(tmp_path / "gemma2", architecture="gemma2"))))
    assert loaded.fused is None
    assert loaded.kernels.reason.startswith("gemma2 is not one of gemma3_text, llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("llama", {}, ""),
        ("gemma3_text", {}, ""),
        ("qwen3_moe", {}, "qwen3_moe is not one of"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "its activation is gelu"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "it caps its logits"),
        ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "it is quantized"),
    ],
)
def test_a_configuration_says_whether_it_can_be_fused(architecture, changes, reason):
    found = why_not_fused(AutoConfig.for_model(architecture, **changes))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_gpu_fuses_unless_settings_say_otherwise():
    gpu = "cuda"
    assert choose_model_kernels(ModelConfig(), gpu).path == FUSED
    assert choose_model_kernels(ModelConfig(kernels="torch"), gpu).path == TORCH
    assert choose_model_kernels(ModelConfig(tensor_parallel_size=2), gpu).path == TORCH
    with pytest.raises(ConfigError, match="the device is cuda"):
        choose_model_kernels(ModelConfig(kernels="portable"), gpu)


def test_numerics_of_a_deterministic_node_name_what_rounds_otherwise(checkpoint, monkeypatch):
    """Modules and a fused decoder give different bits, so their nodes must not continue each other's answers."""
    monkeypatch.setattr(load, "check_deterministic", lambda *_arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(load, "choose_attention", lambda *_arguments: "triton")
    monkeypatch.setattr(
        "outrider.model_hub.support.make_attention_backend",
        lambda *names, latent_dim=0, **heads: (
            interpreted_attention(**heads) if heads else make_attention_backend(*names, latent_dim=latent_dim)
        ),
    )
    monkeypatch.setattr(load, "SPLIT_CONTEXT", 24)  # short, because the interpreter is slow
    torch.set_num_threads(1)
    config = ModelConfig(id=str(checkpoint), deterministic=True)
    fused = load.load_model(config)
    assert fused.info.numerics.startswith("exact (triton ")
    assert fused.info.numerics.endswith(f" features, fused, {NUMERICS})")
    monkeypatch.setattr(load, "why_not_fused", lambda _config: "of this test")
    assert "fused" not in load.load_model(config).info.numerics
