"""Adapters in PEFT's format are read, and those that are more than pairs of A and B are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outrider.errors import ModelError
from outrider.model_hub.adapter_files import read_adapter
from tests.support.adapters import make_adapter
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base, tmp_path):
    """adapter(**options) → the directory of a random adapter."""
    made = []

    def make(**options):
        made.append(make_adapter(tmp_path / str(len(made)), base, **{"seed": 1, **options}))
        return made[-1]

    return make


NAME = "model.layers.1.self_attn.q_proj"


def test_up_is_multiplied_by_the_scaling(adapter):
    directory = adapter(rank=4, config={"lora_alpha": 6})
    raw = load_file(directory / "adapter_model.safetensors")
    part = read_adapter(directory).parts[NAME]
    assert np.array_equal(part.down, raw[f"base_model.model.{NAME}.lora_A.weight"])
    assert np.array_equal(part.up, raw[f"base_model.model.{NAME}.lora_B.weight"] * np.float32(1.5))


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"lora_alpha": 6, "use_rslora": True}, 3.0),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"lora_alpha": 6, "alpha_pattern": {r"layers\.0\..*": 2}}, 1.5),
        ({"lora_alpha": 6, "r": 16, "rank_pattern": {r".*_proj": 4}}, 1.5),
    ],
)
def test_scaling_of_variants_is_that_of_peft(adapter, base, config, scaling):
    directory = adapter(rank=4, config=config)
    raw = load_file(directory / "adapter_model.safetensors")[f"base_model.model.{NAME}.lora_B.weight"]
    assert np.allclose(read_adapter(directory).parts[NAME].up, raw * scaling, rtol=1e-6)
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    assert model.get_submodule(f"base_model.model.{NAME}").scaling["default"] == pytest.approx(scaling)


def test_fingerprints_are_those_of_tensors_and_scaling(adapter):
    first, same = adapter(), adapter(config={"lora_dropout": 0.5, "target_modules": "all-linear"})
    others = [adapter(seed=2), adapter(config={"lora_alpha": 1}), adapter(dtype="bfloat16")]
    found = [read_adapter(each).fingerprint for each in (first, same, *others)]
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_bfloat16_and_float16_are_read_exactly(adapter):
    for dtype in ("bfloat16", "float16"):
        down = read_adapter(adapter(dtype=dtype)).parts[NAME].down
        assert down.dtype == np.float32
        assert np.count_nonzero(down)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("trainable_token_indices", [3]),
    ],
)
def test_more_than_pairs_is_refused_by_name(adapter, name, value):
    with pytest.raises(ModelError, match=f"{name} .*is not supported"):
        read_adapter(adapter(config={name: value}))


def test_other_tensors_are_refused_by_name(adapter):
    directory = adapter()
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}, path)
    with pytest.raises(ModelError, match=r"lm_head\.weight is not supported"):
        read_adapter(directory)
    del tensors[f"base_model.model.{NAME}.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{NAME} has no A and B of the same rank"):
        read_adapter(directory)


def test_a_rank_that_the_configuration_does_not_have_is_refused(adapter):
    with pytest.raises(ModelError, match="has rank 4, but r 8"):
        read_adapter(adapter(rank=4, config={"r": 8}))


def test_damaged_directories_are_refused(adapter, tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    directory = adapter()
    (directory / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="not a JSON object"):
        read_adapter(directory)
    directory = adapter()
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="is damaged"):
        read_adapter(directory)
    path.unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors cannot be read: No such file"):
        read_adapter(directory)
