"""Models whose checkpoints this project reads itself: opened, checked, packed, mapped again, and computed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

import outrider
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.numerics import BatchInvariance
from outrider.errors import ConfigError, ModelError, NotFoundError
from outrider.model_hub import load as load_module
from outrider.model_hub.checkpoint import open_checkpoint
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.open import open_model
from outrider.model_hub.packed_weights import PACKING_MODULES
from tests.model_hub.gguf.test_families import random_model
from tests.model_hub.quantised import test_awq as awq
from tests.model_hub.quantised.checkpoints import write_checkpoint
from tests.support.cached_runner import CachedRunner
from tests.support.processes import run_python
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import make_tiny_model

MIXED = {"attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_down": "Q4_1", "output": "Q8_0"}
IDS = torch.arange(3, 43).unsqueeze(0)


def quantise(name, values):
    kind = MIXED.get(name.removesuffix(".weight").rpartition(".")[2], "Q4_0")
    return gguf.GGMLQuantizationType[kind] if values.ndim > 1 else None


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    if choose_kernels().library is None:
        pytest.skip("no native kernels were built")
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A GGUF file with mixed formats: of a Llama with its own output layer."""
    model = random_model("llama", {"tie_word_embeddings": False})
    return write_gguf(model, tmp_path_factory.mktemp("models") / "tiny-Q4.gguf", quantise=quantise)


@pytest.fixture
def opened(cache):
    def open_(path, **settings):
        return open_model(ModelConfig(id=str(path), cache_dir=str(cache), num_threads=1, **settings))

    return open_


def differs_by(model):
    """Returns the distance of the logits from transformers' in float32, relative to the largest."""
    node = CachedRunner(model)
    found = node.prefill(IDS[0].tolist(), node.table(IDS.shape[1]))
    config = AutoConfig.from_pretrained(model.directory)
    expected = layerwise_logits(config, open_checkpoint(model.directory, "cpu").tensors, token_ids=IDS)[0]
    return float((found - expected).abs().max() / expected.abs().max())


def test_a_gguf_model_stays_packed(opened, quantised):
    model = opened(quantised)
    assert model.info.name == "tiny-Q4"
    assert model.info.weights == "GGUF Q4_0, Q8_0, Q5_0, Q4_1"
    assert model.info.numerics.startswith(f"{BatchInvariance.EXACT} (")
    assert "int8 activations" in model.info.numerics
    assert isinstance(model.native, NativeDecoder)
    assert model.spec.dtype == "bfloat16"
    assert differs_by(model) < 0.1


def test_what_was_packed_is_mapped_without_torch(opened, quantised, cache):
    opened(quantised)
    code = (
        "import sys; from outrider.model_hub.config import ModelConfig; "
        "from outrider.model_hub.open import open_model; "
        f"model = open_model(ModelConfig(id={str(quantised)!r}, cache_dir={str(cache)!r})); "
        "assert model.weights_source == 'packed weights, mapped', model.weights_source; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert run_python("-c", code).returncode == 0


def test_dequantised_weights_need_no_int8_activations(opened, quantised):
    model = opened(quantised, weights="dequantized", dtype="float32")
    assert model.info.weights == "GGUF Q4_0, Q8_0, Q5_0, Q4_1, in float32"
    assert "int8" not in model.info.numerics
    assert differs_by(model) < 1e-4
    assert model.info.fingerprint != opened(quantised).info.fingerprint


def test_torch_computes_with_dequantised_weights(opened, quantised):
    model = opened(quantised, kernels="torch")
    assert model.native is None
    assert differs_by(model) < 1e-4


def test_a_renamed_copy_is_the_same_model(opened, quantised, tmp_path):
    copy = shutil.copyfile(quantised, tmp_path / "other.gguf")
    assert opened(copy).info.fingerprint == opened(quantised).info.fingerprint
    assert opened(tmp_path).info.fingerprint == opened(quantised).info.fingerprint  # a directory with one model


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16])
def test_a_plain_gguf_model_is_one_like_any_other(opened, tmp_path, kind):
    path = write_gguf(
        random_model("gemma3_text", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 12}),
        tmp_path / "plain.gguf",
        quantise=lambda _name, values: kind if values.ndim > 1 else None,
    )
    model = opened(path)
    assert "int8" not in model.info.numerics
    assert differs_by(model) < (0.05 if model.spec.dtype == "bfloat16" else 1e-4)
    assert "lossy int4" in opened(path, weights="int4").info.numerics


def test_links_as_in_the_cache_of_the_hub_have_the_models_name(opened, quantised, tmp_path):
    (tmp_path / "blobs").mkdir()
    blob = shutil.copyfile(quantised, tmp_path / "blobs" / "0c0c")
    link = tmp_path / "linked-Q4.gguf"
    link.symlink_to(blob)
    model = opened(link)
    assert model.info.name == "linked-Q4"
    assert model.info.fingerprint == opened(quantised).info.fingerprint


def test_rotations_are_compared_up_to_the_end_of_the_window(opened, tmp_path, monkeypatch):
    """The check of logits reads 40 positions, at which these frequencies are still right."""
    path = write_gguf(random_model("llama", {}), tmp_path / "model.gguf")
    right = load_module.decoder_options

    def wrong(config):
        options = right(config)
        frequencies = options.rotations[0].frequencies * np.float32(1 + 1e-5)
        return replace(options, rotations=(replace(options.rotations[0], frequencies=frequencies),))

    monkeypatch.setattr(load_module, "decoder_options", wrong)
    with pytest.raises(ModelError, match="the model's rotations differ"):
        opened(path)


def test_a_model_by_layers_is_compared_with_rounded_weights(opened, tmp_path, monkeypatch):
    """In both comparisons: with transformers in the model's dtype, and in float32 if that is too coarse."""
    path = write_gguf(random_model("llama", {}), tmp_path / "model.gguf")
    reason = "for this test"
    monkeypatch.setattr(load_module, "decoder_options", lambda _config: reason)
    found = []
    check = load_module.check_paged_forward

    def compare(model, expected, *, exact, **options):
        found.append((expected, exact()))
        check(model, expected, exact=exact, **options)

    monkeypatch.setattr(load_module, "check_paged_forward", compare)
    opened(path, weights="int4", dtype="float32", keep_packed=False)
    assert len(found) == 1
    torch.testing.assert_close(*found[0], rtol=1e-3, atol=1e-3)


def test_tensors_of_other_shapes_are_refused_before_they_are_packed(opened, tmp_path):
    model = random_model("llama", {"tie_word_embeddings": False})
    keys = model.model.layers[1].self_attn.k_proj
    keys.weight = torch.nn.Parameter(keys.weight[:, :1].contiguous())
    path = write_gguf(model, tmp_path / "wrong.gguf")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight has the shape"):
        opened(path)


def test_quantised_experts_are_refused_by_name(opened, tmp_path):
    path = make_tiny_model(tmp_path / "moe", architecture="qwen3_moe", overrides={"num_experts": 4})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": awq.CONFIG}))
    with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM has quantized experts"):
        opened(path)


def test_what_packing_imports_is_part_of_the_key():
    """Otherwise a change of rotations, for example, would leave weights with the old ones in use."""
    code = (
        "import sys; import outrider.engine.cpu_kernels.packing; import outrider.heads.default_packing; "
        "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('outrider.engine.')))"
    )
    imported = {
        Path(name).relative_to(Path(outrider.__file__).parent) for name in run_python("-c", code).stdout.split()
    }
    packing = {
        path for path in imported if path.name in ("arrays.py", "rotation.py", "scaled_rotations.py", "packing.py")
    }
    assert len(packing) == 4
    assert all(any(path.is_relative_to(part) for part in PACKING_MODULES) for path in packing)


def test_quantised_weights_are_not_rounded_again(opened, quantised):
    with pytest.raises(ConfigError, match=r"model\.weights int8: the checkpoint is quantised already \(GGUF Q4_0"):
        opened(quantised, weights="int8")


def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub(opened):
    with pytest.raises(NotFoundError, match=r"neither a directory, a GGUF file nor"):
        opened("missing.gguf")


def test_an_awq_checkpoint_stays_packed(opened, tmp_path):
    path = write_checkpoint(tmp_path / "awq", awq.Writer(32), awq.CONFIG | {"group_size": 32})
    model = opened(path)
    assert model.info.weights == "awq, 4 bits"
    assert "int8 activations" in model.info.numerics
    assert differs_by(model) < 0.1
    assert differs_by(opened(path, weights="dequantized", dtype="float32")) < 1e-4
