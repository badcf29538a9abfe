from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.quantised.open import open_safetensors
from outrider.model_hub.support import probe_token_ids
from tests.model_hub.quantised.checkpoints import write_checkpoint

BLOCK = (32, 16)
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
UP = "model.layers.1.mlp.up_proj"


class Writer:
    """Quantises random weights, and remembers the parts."""

    def __init__(self, scale_shape, *, part="weight_scale_inv", dtype=torch.float32):
        self.scale_shape, self.part, self.dtype = scale_shape, part, dtype
        self.generator = torch.Generator().manual_seed(5)
        self.written = {}

    def __call__(self, module, out_features, in_features):
        codes = torch.randint(0, 256, (out_features, in_features), generator=self.generator, dtype=torch.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        shape = self.scale_shape(out_features, in_features)
        scales = (torch.rand(shape, generator=self.generator) / 1000).to(self.dtype)
        self.written[module] = (codes.view(torch.float8_e4m3fn), scales)
        return {"weight": self.written[module][0], self.part: scales, "input_scale": torch.tensor(0.5)}


def blocks(out_features, in_features):
    return -(-out_features // BLOCK[0]), -(-in_features // BLOCK[1])


def words(values):
    """Returns the bits of bfloat16 values."""
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_multiplied_by_their_scales(tmp_path, dtype):
    writer = Writer(blocks, dtype=dtype)
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, CONFIG))
    for module, (codes, scales) in writer.written.items():
        repeated = scales.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        assert np.array_equal(tensors[f"{module}.weight"], words(codes.float() * repeated))


def test_the_last_blocks_may_be_incomplete(tmp_path):
    """192 features in blocks of 128 are one and a half blocks, not two of 96."""
    writer = Writer(lambda out_features, in_features: (-(-out_features // 128), -(-in_features // 128)))
    about = CONFIG | {"weight_block_size": [128, 128]}
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, about, overrides={"intermediate_size": 192}))
    for module, (codes, scales) in writer.written.items():
        repeated = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        assert np.array_equal(tensors[f"{module}.weight"], words(codes.float() * repeated))


@pytest.mark.parametrize(
    "scale_shape", [lambda _out, _in: (), lambda _out, _in: (1,), lambda out, _in: (out, 1), lambda out, _in: (out,)]
)
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed-tensors"])
def test_one_scale_for_all_or_for_each_output_feature(tmp_path, scale_shape, method):
    weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
    about = {
        "fp8": {"activation_scheme": "static"},
        "fbgemm_fp8": {"activation_scale_ub": 1200.0},
        "compressed-tensors": {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}},
    }[method]
    writer = Writer(scale_shape, part="weight_scale")
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, about | {"quant_method": method}))
    assert not [name for name in tensors if "scale" in name]
    for module, (codes, scales) in writer.written.items():
        expected = codes.float() * (scales.reshape(-1, 1) if scales.numel() > 1 else scales)
        assert np.array_equal(tensors[f"{module}.weight"], words(expected))


def test_the_model_is_the_one_that_transformers_dequantises(tmp_path):
    path = write_checkpoint(tmp_path, Writer(blocks), CONFIG, dtype="bfloat16", architecture="qwen3")
    tensors = open_safetensors(path)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for name, parameter in own.state_dict().items():
        assert np.array_equal(tensors[name], words(parameter)), name
    with torch.inference_mode():
        expected = own(input_ids=probe_token_ids(320), use_cache=False).logits.float()
    assert torch.equal(layerwise_logits(AutoConfig.from_pretrained(path), tensors, dtype=torch.bfloat16), expected)


def test_parts_that_do_not_fit_are_refused_by_name(tmp_path):
    def reopened(block):
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["weight_block_size"] = block
        (path / "config.json").write_text(json.dumps(config))
        return open_safetensors(path)

    path = write_checkpoint(tmp_path, Writer(blocks), CONFIG)
    for block in ([128, 128], None):
        with pytest.raises(
            ModelError, match=r"up_proj cannot be read: \(128, 64\) weights, \(4, 4\) scales, blocks of"
        ):
            reopened(block)[f"{UP}.weight"]


def test_every_code_has_its_value(tmp_path):
    def quantise(_module, out_features, in_features):
        codes = torch.arange(256, dtype=torch.uint8).repeat(out_features * in_features // 256)
        weight = codes.reshape(out_features, in_features).view(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale_inv": torch.ones(blocks(out_features, in_features))}

    weight = open_safetensors(write_checkpoint(tmp_path, quantise, CONFIG))[f"{UP}.weight"]
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    found = (weight.reshape(-1)[:256].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
