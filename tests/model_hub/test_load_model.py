from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.torch_sdpa import TorchSdpaAttention
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.errors import ConfigError, ModelError, NotFoundError
from outrider.model_hub import load as load_module
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import resolve_device
from outrider.model_hub.layerwise_reference import layerwise_logits
from outrider.model_hub.load import load_model, resolve_dtype
from outrider.model_hub.support import _recorder, check_paged_forward
from tests.support.tiny_model import EOS_TOKEN_ID, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def load(path, **settings):
    return load_model(ModelConfig(id=str(path), **settings))


def test_a_local_directory_is_loaded_and_described(tiny):
    stages = []
    loaded = load_model(ModelConfig(id=str(tiny), name="mine"), progress=lambda *report: stages.append(report))
    spec = loaded.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert (spec.vocab_size, spec.max_model_len, spec.dtype) == (320, 2048, "float32")
    assert spec.bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert loaded.info.name == "mine"
    assert loaded.info.eos_token_ids == (EOS_TOKEN_ID,)
    assert len(loaded.info.fingerprint) == len(loaded.info.vocabulary_fingerprint) == 64
    assert loaded.known_token_ids.tolist() == [index < 299 for index in range(320)]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(loaded.tokenizer_files)
    assert {stage for stage, _, _ in stages} == {"weights"}
    assert stages[-1][1] == stages[-1][2] == 6


def test_a_token_for_padding_that_only_one_of_them_names_parts_no_draft_from_its_target(tiny, copy):
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<padding>"}))
    padded, plain = load(copy), load(tiny)
    assert padded.info.vocabulary_fingerprint == plain.info.vocabulary_fingerprint
    assert padded.known_token_ids.sum() == plain.known_token_ids.sum() + 1


def test_auto_is_the_checkpoints_dtype_but_float32_on_a_cpu_without_native_kernels():
    config = AutoConfig.for_model("llama")
    config.dtype = torch.bfloat16
    cpu, gpu = "cpu", "cuda"
    assert resolve_dtype("auto", cpu, config, is_native=False) == "float32"
    assert resolve_dtype("auto", cpu, config, is_native=True) == "bfloat16"
    assert resolve_dtype("auto", gpu, config, is_native=False) == "bfloat16"
    assert resolve_dtype("float32", gpu, config, is_native=False) == "float32"
    assert resolve_dtype("bfloat16", cpu, config, is_native=False) == "bfloat16"


def test_a_window_of_millions_is_served_as_far_as_positions_can_be_rotated(tmp_path):
    path = make_tiny_model(tmp_path, overrides={"max_position_embeddings": 4_194_304, "rope_theta": 2.8e9})
    assert load(path, max_model_len=4096).spec.max_model_len == 4096
    assert load(path).spec.max_model_len == 1 << 20
    with pytest.raises(ConfigError, match=r"1500000 is beyond the longest window that is served: set at most 1048576"):
        load(path, max_model_len=1_500_000)


def test_rotations_that_turn_too_fast_are_refused_with_the_fix(tmp_path):
    fast = {"rope_type": "longrope", "original_max_position_embeddings": 1 << 20, "rope_theta": 1e4,
            "short_factor": [0.25] * 8, "long_factor": [0.25] * 8, "attention_factor": 1.0}  # fmt: skip
    path = make_tiny_model(tmp_path, overrides={"max_position_embeddings": 1 << 20, "rope_parameters": fast})
    with pytest.raises(ModelError, match=r"cannot be rotated exactly.*: set model\.max_model_len lower"):
        load(path)
    assert load(path, max_model_len=4096).spec.max_model_len == 4096


def test_devices_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match="cuda:99"):
        resolve_device("cuda:99")
    with pytest.raises(ConfigError, match="gpu"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match=r"model\.device mps: models are computed on CPUs and CUDA devices"):
        resolve_device("mps")


def test_an_adapter_is_told_from_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is an adapter \(LoRA\), not a model.*model\.adapters to NAME="):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "two words", "a/b/c"])
def test_a_name_that_is_no_model_is_not_found(name):
    with pytest.raises(NotFoundError, match="neither a directory"):
        load_model(ModelConfig(id=name))


def test_a_directory_without_a_model_says_what_is_missing(tmp_path, copy):
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        load(copy)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1000],
        lambda data: data[: len(data) // 100],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: data + b"more",
    ],
    ids=["cut", "cut header", "empty", "header length", "header", "longer"],
)
def test_a_damaged_weight_file_is_named_with_the_fix(copy, damage):
    weights = copy / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelError, match=rf"{weights} is damaged: .*; copy or download it again"):
        load(copy)


def test_a_damaged_tokenizer_is_named_with_the_fix(copy):
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=rf"in {copy}, tokenizer.json is not a tokenizer: .*; copy or download it"):
        load(copy)


def test_an_unknown_architecture_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="no_such_model"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "ViTModel is not a causal language model"),
        ({"num_attention_heads": 5}, r"config\.json cannot be read: .*ValidationError"),
        ({"head_dim": 12}, "LlamaForCausalLM cannot be loaded from .*: its weights have other shapes"),
        ({"num_hidden_layers": 4}, r"the weights lack model\.layers\.3\.self_attn\.q_proj\.weight \(9 such tensors\)"),
        ({"max_position_embeddings": -5}, "max_position_embeddings -5, which is not a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor '4', which is not a positive number"),
    ],
)
def test_what_a_configuration_says_is_refused_by_name_and_not_by_a_crash(copy, changes, message):
    config = json.loads((copy / "config.json").read_text())
    config.pop("rope_parameters", None)
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_an_encoder_decoder_is_refused_by_name(copy):
    config = AutoConfig.for_model("t5", d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=320)
    (copy / "model.safetensors").unlink()
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(copy)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        load(copy)


@pytest.fixture
def _forgetful_attention(monkeypatch):
    """Makes attention see only the last 11 keys."""
    plain = TorchSdpaAttention.attend

    def forgetful(self, plan, query, key_cache, value_cache, options):
        return plain(self, plan, query, key_cache, value_cache, AttentionOptions(options.scaling, sliding_window=11))

    monkeypatch.setattr(TorchSdpaAttention, "attend", forgetful)


@pytest.mark.usefixtures("_forgetful_attention")
def test_a_window_hidden_from_attention_is_noticed(tiny):
    """This is the negative control of the check at load."""
    with pytest.raises(ModelError, match="differs from the model's own"):
        load(tiny, kernels="torch")


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def rounding_chooses(tmp_path_factory):
    """Makes checkpoints in which bfloat16's rounding decides the choice of experts for some rows of the probe."""
    made = {}

    def make(architecture):
        if architecture not in made:
            settings = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
            config = AutoConfig.for_model(
                architecture, vocab_size=320, initializer_range=0.2, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=512, **settings, **EXPERTS,
            )  # fmt: skip
            torch.manual_seed(1)
            made[architecture] = make_tiny_model(tmp_path_factory.mktemp(architecture))
            (made[architecture] / "model.safetensors").unlink()
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_a_model_that_amplifies_rounding_is_judged_by_its_own(rounding_chooses, architecture, kernels):
    assert load(rounding_chooses(architecture), dtype="bfloat16", kernels=kernels).spec.dtype == "bfloat16"


@pytest.mark.usefixtures("_forgetful_attention")
def test_rounding_of_its_own_hides_no_fault(rounding_chooses):
    with pytest.raises(
        ModelError, match=r"differs from the model's own by .* of the largest logit, the mean of 80 rows"
    ):
        load(rounding_chooses("mixtral"), dtype="bfloat16", kernels="torch")


def test_logits_of_nothing_are_refused_however_far_rounding_goes(tiny):
    """If a model amplifies rounding, three times its rounding exceeds even the difference of unrelated logits."""
    model = load(tiny, dtype="bfloat16", kernels="torch")
    rounded, exact = torch.randn((2, 2, 40, model.spec.vocab_size), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ModelError, match="differs from the model's own by"):
        check_paged_forward(model, rounded, exact=lambda: exact)


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({"quant_method": "hqq"}, "quantized by hqq"),
        ({"load_in_4bit": True}, "quantized by bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
    ],
)
def test_weights_quantized_in_an_unsupported_way_are_refused_on_a_cpu_with_the_way_out(copy, quantization, why):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ModelError, match=rf"LlamaForCausalLM.*{why}.*model\.weights=int8"):
        load(copy)


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
def test_a_window_that_is_not_the_models_is_seen_at_load(tmp_path, monkeypatch):
    """The model's window is 20 tokens, so that a check of twelve positions would not notice its absence."""
    directory = make_tiny_model(tmp_path, architecture="mistral")
    assert load(directory).spec.num_layers == 3

    def pack(*arguments, **keywords):
        weights = pack_weights(*arguments, **keywords)
        return dataclasses.replace(weights, shape=dataclasses.replace(weights.shape, sliding_windows=(0,) * 3))

    monkeypatch.setattr(load_module, "pack_weights", pack)
    with pytest.raises(ModelError, match="differs from the model's own"):
        load(directory)


def test_sinks_other_than_one_for_each_query_head_are_refused():
    heads = torch.zeros(2, 4, 16)
    with pytest.raises(ModelError, match=r"Model has attention sinks \[2\] for 4 query heads"):
        _recorder("Model", {}, {})(0, heads, heads, heads, AttentionOptions(1.0, sinks=torch.zeros(2)), {})


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
@pytest.mark.parametrize("architecture", ["llama", "glm4", "minicpm3"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_are_compared_with_rounded_ones(tmp_path, monkeypatch, architecture, weights):
    """The weights of this model are so random that rounding them to 4 bits changes a third of each logit."""
    directory = make_tiny_model(tmp_path, architecture=architecture)
    model = load(directory, weights=weights)
    assert f"lossy {weights} weights" in model.info.numerics
    assert model.info.weights == f"{weights}, rounded at load"
    if weights == "int4":
        monkeypatch.setattr(
            load_module, "layerwise_logits", lambda *arguments, quantise, **_: layerwise_logits(*arguments)
        )
        with pytest.raises(ModelError, match="differs from the model's own"):
            load(directory, weights=weights)


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
@pytest.mark.parametrize("is_tied", [True, False])
def test_files_of_torch_are_packed_like_safetensors(tmp_path, is_tied):
    """As older versions of transformers write them: both names of tied weights are there."""
    path = make_tiny_model(tmp_path / "safetensors", overrides={"tie_word_embeddings": is_tied})
    expected = load(path).native.weights
    model = AutoModelForCausalLM.from_pretrained(path)
    pickled = shutil.copytree(path, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    found = load(pickled).native.weights
    assert found.shape == expected.shape
    assert found.blobs.keys() == expected.blobs.keys()
    assert all(np.array_equal(found.blobs[name], expected.blobs[name]) for name in expected.blobs)
    (pickled / "pytorch_model.bin").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        load(pickled)


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
def test_weights_that_only_one_of_two_names_ties_are_packed_as_transformers_reads_them(tmp_path):
    """The head alone, names without their prefix, a value head, and other values in both though they should be tied."""
    path = make_tiny_model(tmp_path / "tied", overrides={"tie_word_embeddings": True})
    expected = load(path).native.weights.blobs
    tensors = load_file(path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    for changed in (
        {**tensors, "lm_head.weight": embedding},
        {name.removeprefix("model."): value for name, value in {**tensors, "embed_tokens.weight": embedding}.items()},
        {
            **tensors,
            "model.embed_tokens.weight": embedding,
            "v_head.summary.weight": torch.ones(1, 64),
            "model.layers.9.eh_proj.weight": torch.ones(2),
        },
    ):
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        found = load(path).native.weights.blobs
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
    save_file({**tensors, **both}, path / "model.safetensors", {"format": "pt"})
    assert "embedding" in load(path).native.weights.blobs
