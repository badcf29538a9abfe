from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.lazy_tensors import dequantised
from outrider.model_hub.quantised.open import open_safetensors
from outrider.model_hub.support import probe_token_ids
from tests.model_hub.quantised.checkpoints import expected_weight, pack_fields, random_scales, write_checkpoint

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIG = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
UP = "model.layers.1.mlp.up_proj"


class Writer:
    """Quantises with random codes, and remembers them: [out, in] codes, [out, num_groups] zeros and scales."""

    def __init__(self, group_size, *, has_zeros=True, plain=()):
        self.generator = np.random.default_rng(3)
        self.group_size = group_size
        self.has_zeros = has_zeros
        self.plain = plain
        self.written = {}

    def __call__(self, module, out_features, in_features):
        if module.endswith(self.plain):
            return {"weight": torch.randn(out_features, in_features, dtype=torch.float16) / 8}
        num_groups = in_features // self.group_size
        codes = self.generator.integers(0, 16, (out_features, in_features))
        zeros = self.generator.integers(0, 16, (out_features, num_groups)) if self.has_zeros else np.int64(8)
        scales = random_scales(self.generator, out_features, num_groups)
        self.written[module] = (codes, zeros, scales)
        return {
            "qweight": pack_fields(codes.T, 4, ORDER),
            "qzeros": pack_fields(np.broadcast_to(zeros, scales.shape).T, 4, ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }


@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_codes_scales_and_zero_points_are_those_that_were_packed(tmp_path, group_size):
    writer = Writer(group_size)
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, CONFIG | {"group_size": group_size}))
    assert len(writer.written) == 21
    for module, (codes, zeros, scales) in writer.written.items():
        weight = tensors[f"{module}.weight"]
        assert weight.group_size == group_size
        assert np.array_equal(weight.codes, codes)
        assert weight.scales.units.dtype == weight.minima.units.dtype == np.float16
        assert np.array_equal(weight.scales.units, scales)
        assert weight.scales.steps is None
        assert np.array_equal(weight.minima.steps, zeros)
        assert np.array_equal(weight.dequantise(), expected_weight(codes, zeros, scales))


def test_without_zero_points_the_codes_are_signed(tmp_path):
    writer = Writer(32, has_zeros=False)
    weight = open_safetensors(write_checkpoint(tmp_path, writer, CONFIG | {"zero_point": False}))[f"{UP}.weight"]
    codes, zeros, scales = writer.written[UP]
    assert weight.minima is None
    assert np.array_equal(weight.codes, codes - 8)
    assert np.array_equal(weight.dequantise(), expected_weight(codes, zeros, scales))


def test_a_group_of_many_inputs_is_divided_into_groups_that_the_kernels_have(tmp_path):
    writer = Writer(256)
    path = write_checkpoint(tmp_path, writer, CONFIG, overrides={"hidden_size": 256, "intermediate_size": 768})
    tensors = open_safetensors(path)
    for module, (codes, zeros, scales) in writer.written.items():
        weight = tensors[f"{module}.weight"]
        assert (weight.group_size, weight.num_groups) == (128, codes.shape[1] // 128)
        assert weight.scales.units.shape == scales.shape
        assert np.array_equal(weight.dequantise(), expected_weight(codes, zeros, scales))


def test_the_logits_are_those_of_the_dequantised_model_with_modules_that_stay_plain(tmp_path):
    path = write_checkpoint(tmp_path, Writer(32, plain=("v_proj", "down_proj")), CONFIG)
    tensors = open_safetensors(path)
    names = [name for name in tensors if "layers.0." in name]
    assert len(names) == 9
    assert f"{UP}.qweight" not in tensors
    config = AutoConfig.from_pretrained(path)
    found = layerwise_logits(config, tensors)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    plain = {name: torch.tensor(values) for name, values in dequantised(tensors).items()}
    model.load_state_dict(plain, strict=False)
    model.tie_weights()
    with torch.inference_mode():
        assert torch.equal(found, model.eval()(input_ids=probe_token_ids(320), use_cache=False).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "gemv"}, "AWQ in the layout 'gemv' is not supported, only 'gemm': serve the checkpoint"),
        ({"bits": 8}, "AWQ of 8 bits is not supported"),
    ],
)
def test_other_layouts_are_refused(tmp_path, change, message):
    path = write_checkpoint(tmp_path, Writer(32), CONFIG | change)
    with pytest.raises(ModelError, match=message):
        open_safetensors(path)


def lossy_scales(parts):
    return parts | {"scales": parts["scales"].float() * 1.0001}


def without_zeros(parts):
    return {name: values for name, values in parts.items() if name != "qzeros"}


def fewer_scales(parts):
    return parts | {"scales": parts["scales"][:, :-1]}


def many_groups(parts):
    return parts | {"scales": parts["scales"].repeat(4, 1), "qzeros": parts["qzeros"].repeat(4, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lossy_scales, r"up_proj\.scales has scales that float16 cannot represent, such as 0\.0"),
        (without_zeros, r"has no model\.layers\.1\.mlp\.up_proj\.qzeros: the weights are incomplete"),
        (fewer_scales, r"the weight of model\.layers\.1\.mlp\.up_proj cannot be read: \(128, 64\) codes, \(127, 2\)"),
        (many_groups, r"up_proj cannot be read: 64 inputs in 8 groups; groups of 16 inputs or a multiple"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    writer = Writer(32)

    def quantise(module, *shape):
        parts = writer(module, *shape)
        return change(parts) if module == UP else parts

    tensors = open_safetensors(write_checkpoint(tmp_path, quantise, CONFIG))
    with pytest.raises(ModelError, match=message):
        tensors[f"{UP}.weight"]
