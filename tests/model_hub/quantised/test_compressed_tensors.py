from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.errors import ModelError
from outrider.model_hub.quantised.open import open_safetensors
from tests.model_hub.quantised.checkpoints import expected_weight, pack_fields, random_scales, write_checkpoint

UP = "model.layers.1.mlp.up_proj"


def config(layout, **weights):
    arguments = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
    }


class Writer:
    """Quantises with random codes, and remembers them: [out, in] codes, [out, num_groups] zeros and scales."""

    def __init__(self, *, bits, is_packed, group_size=None, has_zeros=False, extra=None):
        self.generator = np.random.default_rng(6)
        self.bits, self.is_packed, self.group_size, self.has_zeros = bits, is_packed, group_size, has_zeros
        self.extra = extra or {}
        self.written = {}

    def __call__(self, module, out_features, in_features):
        num_groups, half = in_features // (self.group_size or in_features), 2 ** (self.bits - 1)
        codes = self.generator.integers(-half, half, (out_features, in_features))
        zeros = self.generator.integers(-half, half, (out_features, num_groups)) if self.has_zeros else np.int64(0)
        scales = torch.from_numpy(random_scales(self.generator, out_features, num_groups)).to(torch.bfloat16)
        self.written[module] = (codes, zeros, scales.float().numpy())
        parts = {"weight_scale": scales, **self.extra}
        if self.is_packed:
            parts["weight_packed"] = pack_fields(codes + half, self.bits)
            parts["weight_shape"] = torch.tensor([out_features, in_features])
        else:
            parts["weight"] = torch.from_numpy(codes.astype(np.int8))
        if self.has_zeros:
            packed = pack_fields((zeros + half).T, self.bits).T
            parts["weight_zero_point"] = packed if self.is_packed else torch.from_numpy(zeros.astype(np.int8))
        return parts


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "group_size": None, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 8, "group_size": 64}),
        ("int-quantized", {"num_bits": 8, "group_size": None, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 4, "group_size": 32}),
    ],
)
def test_codes_scales_and_zero_points_are_those_that_were_stored(tmp_path, layout, weights, has_zeros):
    is_packed, bits = layout == "pack-quantized", weights["num_bits"]
    writer = Writer(bits=bits, is_packed=is_packed, group_size=weights["group_size"], has_zeros=has_zeros)
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, config(layout, **weights)))
    assert not [name for name in tensors if not name.endswith(".weight")]
    for module, (codes, zeros, scales) in writer.written.items():
        weight = tensors[f"{module}.weight"]
        shift = 8 if has_zeros and is_packed and bits == 4 else 0
        assert np.array_equal(weight.codes, codes + shift)
        assert np.array_equal(weight.scales.units, scales)
        assert (weight.minima is not None) == has_zeros
        assert np.array_equal(weight.dequantise(), expected_weight(codes, zeros, scales))


def test_one_scale_for_a_whole_matrix_and_stored_scales_of_activations(tmp_path):
    extra = {"weight_scale": torch.tensor([0.25]), "input_scale": torch.tensor([3.0]), "output_scale": torch.ones(1)}
    writer = Writer(bits=8, is_packed=False, extra=extra)
    about = config("int-quantized", num_bits=8, strategy="tensor", group_size=None)
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, about))
    weight = tensors[f"{UP}.weight"]
    assert weight.scales.units.shape == (128, 1)
    assert np.array_equal(weight.dequantise(), writer.written[UP][0] / 4)
    assert not [name for name in tensors if "scale" in name]


def test_zero_points_of_zero_that_old_checkpoints_store_are_none(tmp_path):
    writer = Writer(bits=8, is_packed=False)

    def quantise(module, *shape):
        return writer(module, *shape) | {"weight_zero_point": torch.zeros(shape[0], 1, dtype=torch.int8)}

    about = config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    assert open_safetensors(write_checkpoint(tmp_path, quantise, about))[f"{UP}.weight"].minima is None


def test_scales_that_float16_cannot_represent_are_refused_by_name(tmp_path):
    extra = {"weight_scale": torch.full((1,), 2.0**-26, dtype=torch.bfloat16)}
    about = config("int-quantized", num_bits=8, strategy="tensor", group_size=None)
    tensors = open_safetensors(write_checkpoint(tmp_path, Writer(bits=8, is_packed=False, extra=extra), about))
    with pytest.raises(
        ModelError, match=rf"{UP}\.weight_scale has scales that float16 cannot represent, such as 1\.49"
    ):
        tensors[f"{UP}.weight"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (config("marlin-24"), "in the format 'marlin-24' is not supported, only pack-quantized, int-quantized"),
        (config("nvfp4-pack-quantized", type="float"), "in the format 'nvfp4-pack-quantized' is not supported"),
        (config("pack-quantized", num_bits=3), "with int weights of 3 bits by group is not supported"),
        (config("naive-quantized", type="float"), "with float weights of 4 bits by group is not supported"),
        (config("pack-quantized", actorder="group"), r"inputs ordered by activation \(actorder group\)"),
        (config("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity \(sparse-24"),
        (config("pack-quantized") | {"transform_config": {"config_groups": {"R1": {}}}}, r"\(transform_config\)"),
    ],
)
def test_other_formats_are_refused(tmp_path, about, message):
    path = write_checkpoint(tmp_path, Writer(bits=4, is_packed=True, group_size=32), about)
    with pytest.raises(ModelError, match=message):
        open_safetensors(path)


def test_inputs_in_another_order_are_refused_whatever_the_configuration_says(tmp_path):
    extra = {"weight_g_idx": torch.zeros(64, dtype=torch.int32)}
    writer = Writer(bits=4, is_packed=True, group_size=32, extra=extra)
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, config("pack-quantized")))
    with pytest.raises(ModelError, match=r"weight_g_idx orders inputs by activation"):
        tensors[f"{UP}.weight"]
