"""The kernels and dtype of a model, and the numerics that its node publishes."""

import sys

import pytest
import torch

from outrider.constraints.grammar import NUMERICS
from outrider.engine.cpu_kernels.compiler import NO_COMPILER
from outrider.engine.cpu_kernels.library_cache import LIBRARIES_VARIABLE
from outrider.engine.cpu_kernels.paths import AUTO, PREFERENCE, TORCH, KernelChoice, choose_kernels
from outrider.engine.numerics import KERNELS_REVISION
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import check_deterministic, choose_attention, choose_model_kernels
from outrider.model_hub.load import load_model
from tests.support.tiny_model import make_tiny_model

NATIVE = choose_kernels()
needs_native = pytest.mark.skipif(NATIVE.library is None, reason=str(NATIVE))


@pytest.fixture(scope="module")
def bfloat16_checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("llama"), dtype="bfloat16")


def load(path, **settings):
    return load_model(ModelConfig(id=str(path), **settings))


def facts(loaded):
    return loaded.info.dtype, loaded.info.numerics, loaded.native is not None


@needs_native
def test_native_kernels_are_exact_in_the_checkpoints_dtype_and_in_float32(bfloat16_checkpoint):
    loaded = load(bfloat16_checkpoint)
    assert facts(loaded) == ("bfloat16", f"exact ({NATIVE.arithmetic} {KERNELS_REVISION}, {NUMERICS})", True)
    assert loaded.kernels == NATIVE
    assert loaded.spec.dtype == "bfloat16"
    assert loaded.model is None  # native kernels hold the only copy of the weights
    assert facts(load(bfloat16_checkpoint, dtype="float32")) == (
        "float32",
        f"exact ({NATIVE.arithmetic} {KERNELS_REVISION}, {NUMERICS})",
        True,
    )


@pytest.mark.parametrize(
    ("settings", "dtype", "promise"),
    [({}, "float32", "exact up to ties"), ({"dtype": "bfloat16"}, "bfloat16", "batch-dependent")],
    ids=["auto", "bfloat16"],
)
def test_torch_on_a_cpu_says_how_far_answers_depend_on_the_batch(bfloat16_checkpoint, settings, dtype, promise):
    loaded = load(bfloat16_checkpoint, kernels="torch", **settings)
    assert facts(loaded) == (dtype, f"{promise} (torch {dtype}, {NUMERICS})", False)
    assert str(loaded.kernels) == "native kernels: none (model.kernels is torch); torch kernels are used"


def test_without_libraries_or_a_compiler_torch_is_used_and_the_reason_told(bfloat16_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv(LIBRARIES_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent")
    loaded = load(bfloat16_checkpoint)
    assert facts(loaded) == ("float32", f"exact up to ties (torch float32, {NUMERICS})", False)
    assert NO_COMPILER in str(loaded.kernels)


@needs_native
def test_a_model_that_native_kernels_cannot_compute_is_torchs_in_torchs_dtype(tmp_path):
    path = make_tiny_model(tmp_path / "odd", dtype="bfloat16", overrides={"head_dim": 20})
    loaded = load(path)
    assert facts(loaded) == ("float32", f"exact up to ties (torch float32, {NUMERICS})", False)
    assert "its heads have 20 dimensions" in str(loaded.kernels)
    assert loaded.model.dtype == torch.float32
    with pytest.raises(ConfigError, match=f"{NATIVE.path} is not available: its heads have 20 dimensions"):
        load(path, kernels=NATIVE.path)


def test_a_chosen_attention_backend_is_torchs():
    config = ModelConfig(attention="torch_sdpa")
    assert choose_model_kernels(config, "cpu").reason == "model.attention is torch_sdpa"
    with pytest.raises(ConfigError, match=r"model\.kernels portable is not available: model\.attention is torch_sdpa"):
        choose_model_kernels(ModelConfig(attention="torch_sdpa", kernels="portable"), "cpu")


def test_the_setting_offers_every_path():
    (limits,) = (
        field.metadata["limits"] for field in ModelConfig.__dataclass_fields__.values() if field.name == "kernels"
    )
    assert set(limits.choices) == {AUTO, TORCH, *PREFERENCE}


@needs_native
def test_int8_weights_are_named_lossy_and_are_another_model(bfloat16_checkpoint):
    plain, rounded = load(bfloat16_checkpoint), load(bfloat16_checkpoint, weights="int8")
    expected = f"exact ({NATIVE.arithmetic} {KERNELS_REVISION}, lossy int8 weights and activations, {NUMERICS})"
    assert rounded.info.numerics == expected
    assert rounded.info.fingerprint != plain.info.fingerprint
    sizes = [sum(blob.nbytes for blob in each.native.weights.blobs.values()) for each in (rounded, plain)]
    assert sizes[0] < sizes[1]


def test_int8_weights_without_native_kernels_are_refused(bfloat16_checkpoint):
    with pytest.raises(ConfigError, match="int8 needs native kernels"):
        load(bfloat16_checkpoint, weights="int8", kernels="torch")


def test_deterministic_mode_asks_for_what_keeps_it():
    gpu, cpu = "cuda", "cpu"
    wanted = ModelConfig(deterministic=True)
    assert (choose_attention(wanted, gpu), choose_attention(ModelConfig(), gpu)) == ("triton", "auto")
    with pytest.raises(ConfigError, match=r"torch_sdpa is not deterministic.*auto or triton"):
        choose_attention(ModelConfig(deterministic=True, attention="torch_sdpa"), gpu)
    torch_kernels = KernelChoice(path="torch", library=None, reason="model.kernels is torch")
    with pytest.raises(ConfigError, match=r"deterministic needs native kernels.*model\.kernels is torch"):
        check_deterministic(wanted, cpu, torch_kernels)
    check_deterministic(ModelConfig(), cpu, torch_kernels)


def test_deterministic_mode_on_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels = KernelChoice(path="torch", library=None, reason="the device is cuda")
    with pytest.raises(ConfigError, match=r"deterministic needs the triton package"):
        check_deterministic(ModelConfig(deterministic=True), "cuda", kernels)
