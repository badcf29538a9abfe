from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import read_json
from tests.support.tiny_gguf import GgufModel, float_values, open_gguf, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 6.0],
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.3],
}
FOUR_BILLION = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 64, "max_position_embeddings": 65536}),
    "llama yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                                 "original_max_position_embeddings": 512}}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "smollm 3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma 2": ("gemma2", {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma 2 27B": ("gemma2", {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16,
                               "sliding_window": 12}),
    "gemma 3": ("gemma3_text", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 12,
                                "query_pre_attn_scalar": 32}),
    "gemma 3 4B": ("gemma3_text", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 12,
                                   "query_pre_attn_scalar": 32, "rope_parameters": FOUR_BILLION}),
    "gemma 3 27B": ("gemma3_text", {"num_hidden_layers": 62, "head_dim": 32, "query_pre_attn_scalar": 16,
                                    "sliding_window": 12}),
    "phi 3": ("phi3", {"sliding_window": 20}),
    "phi 3 long": ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 128,
                            "original_max_position_embeddings": 32}),
}  # fmt: skip


def random_model(model_type: str, overrides: dict) -> AutoModelForCausalLM:
    settings = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **settings | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "proj" in name or "embed" in name or "norm" in name:  # ones and zeros would hide mistakes
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.15)
    return model.eval()


def load(checkpoint: GgufModel) -> AutoModelForCausalLM:
    """Makes transformers' model from the configuration and the tensors that were read."""
    config = AutoConfig.from_pretrained(checkpoint.directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: torch.from_numpy(np.array(float_values(value))) for name, value in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model.eval()


def logits(model: AutoModelForCausalLM) -> torch.Tensor:
    token_ids = torch.randint(0, model.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return model(token_ids).logits[0]


@pytest.mark.parametrize(("model_type", "overrides"), MODELS.values(), ids=MODELS)
def test_what_was_read_computes_the_same_logits(model_type, overrides, tmp_path):
    original = random_model(model_type, overrides)
    expected = logits(original)
    checkpoint = open_gguf(write_gguf(original, tmp_path / "tiny.gguf"), tmp_path / "cache")
    read = logits(load(checkpoint))
    assert expected.std() > 0.1
    torch.testing.assert_close(read, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert "quantization_config" not in read_json(checkpoint.directory / "config.json")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5, which is not supported"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count = 8"),
        ({"block_count": 40_000_000}, "has 3 layers and states 40000000"),
    ],
)
def test_metadata_that_would_change_the_logits_is_not_ignored(tmp_path, metadata, message):
    path = write_gguf(random_model("llama", {}), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_gguf(path, tmp_path / "cache")
