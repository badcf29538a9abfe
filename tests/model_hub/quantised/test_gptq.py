from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from outrider.errors import ModelError
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.quantised.open import open_safetensors
from tests.model_hub.quantised.checkpoints import expected_weight, pack_fields, random_scales, write_checkpoint

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
UP = "model.layers.1.mlp.up_proj"


class Writer:
    """Quantises with random codes, and remembers them: [out, in] codes, [out, num_groups] zeros and scales."""

    def __init__(self, *, bits=4, group_size=32, symmetric=False, version=1, order=None, smallest_zero=0):
        self.generator = np.random.default_rng(4)
        self.bits, self.group_size, self.symmetric, self.version = bits, group_size, symmetric, version
        self.order, self.smallest_zero = order, smallest_zero
        self.written = {}

    def __call__(self, module, out_features, in_features):
        group_size = in_features if self.group_size == -1 else self.group_size
        num_groups, end = in_features // group_size, 2**self.bits
        codes = self.generator.integers(0, end, (out_features, in_features))
        zeros = self.generator.integers(self.smallest_zero, end, (out_features, num_groups))
        if self.symmetric:
            zeros[:] = end // 2
        scales = random_scales(self.generator, out_features, num_groups)
        self.written[module] = (codes, zeros, scales)
        order = np.arange(in_features) // group_size
        if self.order:
            order = self.order(order)
        return {
            "qweight": pack_fields(codes, self.bits).T,
            "qzeros": self.pack_zeros(zeros.T),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
            "bias": torch.zeros(out_features, dtype=torch.float16),
        }

    def pack_zeros(self, zeros):
        """Packs as GPTQModel, which subtracts 1 from each field of version 1 by one subtraction of whole words."""
        ones = int("1" * 8, 16) if self.bits == 4 else int("01" * 4, 16)
        words = pack_fields(zeros, self.bits).numpy().view(np.uint32)
        return torch.from_numpy((words - np.uint32(ones * (self.version == 1))).view(np.int32))


class AutoGptqWriter(Writer):
    """Packs as AutoGPTQ, which subtracts 1 from the zeros. It cannot write a zero of 0."""

    def pack_zeros(self, zeros):
        return pack_fields(zeros - 1, self.bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_codes_scales_and_zero_points_are_those_that_were_packed(tmp_path, version, symmetric, bits):
    writer = Writer(bits=bits, symmetric=symmetric, version=version)
    about = CONFIG | {"bits": bits, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    tensors = open_safetensors(write_checkpoint(tmp_path, writer, about))
    assert len(writer.written) == 21
    for module, (codes, zeros, scales) in writer.written.items():
        weight = tensors[f"{module}.weight"]
        # 4-bit codes with zero points stay unsigned, as the kernels want them.
        shift = 0 if bits == 4 and not symmetric else 2 ** (bits - 1)
        assert weight.group_size == 32
        assert np.array_equal(weight.codes, codes - shift)
        assert np.array_equal(weight.scales.units, scales)
        if symmetric:
            assert weight.minima is None
        else:
            assert np.array_equal(weight.minima.steps, zeros - shift)
        assert np.array_equal(weight.dequantise(), expected_weight(codes, zeros, scales))


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_that_autogptq_packed(tmp_path, bits):
    writer = AutoGptqWriter(bits=bits, smallest_zero=1)
    weight = open_safetensors(write_checkpoint(tmp_path, writer, CONFIG | {"bits": bits}))[f"{UP}.weight"]
    assert np.array_equal(weight.dequantise(), expected_weight(*writer.written[UP]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_group_for_a_whole_row(tmp_path, symmetric):
    writer = Writer(group_size=-1, symmetric=symmetric)
    about = CONFIG | {"group_size": -1, "desc_act": True}  # the order of inputs does not matter in one group
    path = write_checkpoint(tmp_path, writer, about, overrides={"intermediate_size": 384})
    for module, written in writer.written.items():
        weight = open_safetensors(path)[f"{module}.weight"]
        assert weight.group_size == (128 if "down" in module else 64)
        assert weight.scales.units.shape == (len(weight.codes), 1)
        assert np.array_equal(weight.dequantise(), expected_weight(*written))


def test_biases_are_plain_tensors_and_those_of_zeros_do_not_matter(tmp_path):
    path = write_checkpoint(tmp_path, Writer(), CONFIG)
    tensors = open_safetensors(path)
    assert tensors[f"{UP}.bias"].dtype == np.float32
    assert {name.split(".")[-1] for name in tensors} == {"weight", "bias"}
    assert layerwise_logits(AutoConfig.from_pretrained(path), tensors).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "GPTQ of 3 bits is not supported, only of 4 and 8: serve the checkpoint"),
        ({"desc_act": True}, r"inputs ordered by activation \(desc_act\)"),
        ({"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin' is not supported, only 'gptq' and 'gptq_v2'"),
    ],
)
def test_other_layouts_are_refused(tmp_path, change, message):
    path = write_checkpoint(tmp_path, Writer(), CONFIG | change)
    with pytest.raises(ModelError, match=message):
        open_safetensors(path)


def test_inputs_in_another_order_are_refused_whatever_the_configuration_says(tmp_path):
    path = write_checkpoint(tmp_path, Writer(order=np.random.default_rng(1).permutation), CONFIG)
    tensors = open_safetensors(path)
    with pytest.raises(ModelError, match=rf"{UP}\.g_idx orders inputs by activation .*: serve the checkpoint"):
        tensors[f"{UP}.weight"]


def test_codes_of_another_number_of_bits_in_one_module_are_refused(tmp_path):
    four, two = Writer(), Writer(bits=2)
    path = write_checkpoint(tmp_path, lambda module, *shape: (two if module == UP else four)(module, *shape), CONFIG)
    tensors = open_safetensors(path)
    with pytest.raises(ModelError, match=r"up_proj cannot be read: codes of 2 bits, not of 4 or 8"):
        tensors[f"{UP}.weight"]
