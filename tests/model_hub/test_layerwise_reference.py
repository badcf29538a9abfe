"""Logits computed layer by layer from a mapping of tensors have the bits of transformers' whole model."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.lazy_tensors import dequantised
from outrider.model_hub.quantised.open import open_safetensors
from outrider.model_hub.support import probe_token_ids
from tests.support.tiny_model import make_tiny_model


def whole_logits(path, dtype, token_ids):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=token_ids, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_the_logits_have_the_bits_of_the_whole_model(tmp_path, architecture, tied, dtype):
    overrides = {"tie_word_embeddings": tied}
    path = make_tiny_model(tmp_path, architecture=architecture, dtype="bfloat16", overrides=overrides)
    tensors = open_safetensors(path)
    assert ("lm_head.weight" in tensors) is not tied
    found = layerwise_logits(AutoConfig.from_pretrained(path), tensors, dtype=dtype)
    assert torch.equal(found, whole_logits(path, dtype, probe_token_ids(320)))


def test_any_token_ids_and_a_float16_checkpoint(tmp_path):
    path = make_tiny_model(tmp_path, architecture="qwen2", dtype="float16")
    token_ids = torch.tensor([[5, 6, 7]])
    found = layerwise_logits(AutoConfig.from_pretrained(path), open_safetensors(path), token_ids=token_ids)
    assert torch.equal(found, whole_logits(path, torch.float32, token_ids))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), overrides={"tie_word_embeddings": False})


def test_one_layer_or_one_embedding_is_in_memory(tiny):
    tensors = dequantised(open_safetensors(tiny))
    read, held = [], []

    class Watched(dict):
        """Records what is read, and the weights that are in memory when another layer begins."""

        def __getitem__(self, name):
            if "q_proj" in name or "layers" not in name:
                held.append(num_weights_in_memory() - before)
            read.append(name.split(".")[2] if "layers" in name else name)
            return tensors[name]

    before = num_weights_in_memory()
    layerwise_logits(AutoConfig.from_pretrained(tiny), Watched.fromkeys(tensors))
    layers = [layer for layer in "012" for _ in range(9)]
    assert read == ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]
    assert held == [0] * 6


def num_weights_in_memory():
    parameters = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    return sum(each.numel() for each in parameters if not each.is_meta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lack model\.layers\.1\.mlp\.up_proj\.weight \(1 such"),
        ({"model.layers.1.mlp.up_proj.bias": np.ones(128, np.float32)}, r"no place for .*up_proj\.bias"),
        ({"model.norm.weight": np.ones(63, np.float32)}, r"model\.norm\.weight has the shape \[63\].* needs \[64\]"),
        ({"lm_head.weight": None}, r"lack lm_head\.weight"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tiny, change, message):
    tensors = {**open_safetensors(tiny), **change}
    for name in [name for name, value in tensors.items() if value is None]:
        del tensors[name]
    with pytest.raises(ModelError, match=message):
        layerwise_logits(AutoConfig.from_pretrained(tiny), tensors)


def test_tensors_that_change_nothing_and_the_quantization_are_ignored(tiny):
    config = AutoConfig.from_pretrained(tiny)
    expected = layerwise_logits(config, open_safetensors(tiny))
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    tensors = {**open_safetensors(tiny), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(128, np.float32)
    assert torch.equal(layerwise_logits(config, tensors), expected)
    assert config.quantization_config, "the caller's configuration is unchanged"
