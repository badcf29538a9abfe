"""Adapters in PEFT's format are read, and those that are more than pairs of A and B are refused by name."""

from __future__ import annotations

import json
import os
import time

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


def test_matching_patterns_takes_little_time(adapter):
    started = time.thread_time()
    patterns = [*(f"layers.{n}.self_attn.q_proj" for n in range(960)), *(f".*{n}x" for n in range(64))]
    read_adapter(adapter(config={"alpha_pattern": dict.fromkeys(patterns, 1)}))
    assert time.thread_time() - started < 10


@pytest.mark.parametrize("patterns", [["a" * 129], [".*a.*b"], [f".*{n}x" for n in range(65)]])
def test_patterns_that_take_long_are_refused(adapter, patterns):
    with pytest.raises(ModelError, match=r"the pattern .* is not supported: name the layer"):
        read_adapter(adapter(config={"alpha_pattern": dict.fromkeys(patterns, 1)}))


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
        ("kasa_config", {"beta": 1e-4}),
        ("use_bdlora", {"nblocks": 2}),
        ("monteclora_config", {"num_samples": 2}),
        ("a_later_method", True),
        ("a_later_config", {"a": 1}),
        ("a_later_mode", "fast"),
        *(
            ("init_lora_weights", value)
            for value in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "later", 3, [], {})
        ),
    ],
)
def test_more_than_pairs_is_refused_by_name(adapter, name, value):
    with pytest.raises(ModelError, match=f"'{name}' .*is not supported"):
        read_adapter(adapter(config={name: value}))


def test_settings_that_only_matter_to_training_are_ignored(adapter):
    config = {
        "auto_mapping": {"parent_library": "transformers"},
        "peft_version": "0.21.2",
        "revision": "main",
        "inference_mode": True,
        "exclude_modules": ["lm_head"],
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
        "megatron_config": {"a": 1},
        "megatron_core": "megatron.core",
        "loftq_config": {"loftq_bits": 4},
        "eva_config": {"rho": 2.0},
        "corda_config": {"corda_method": "ipm"},
        "lora_ga_config": {"direction": "ArB2r"},
        "velora_config": {"num_groups": 2},
        "runtime_config": {"ephemeral_gpu_offload": True},
        "qalora_group_size": 16,
        "ensure_weight_tying": True,
        "a_later_switch": False,
        "a_later_list": [],
        "a_later_size": 16,
    }
    for value in (True, False, None, "gaussian", "orthogonal", "eva", "mica"):
        assert read_adapter(adapter(config={**config, "init_lora_weights": value})).parts


@pytest.mark.parametrize("kind", [True, "pissa", "olora", "mica", "orthogonal"])
def test_an_adapter_that_peft_wrote_is_right_or_refused(base, tmp_path, kind):
    """PEFT converts adapters of a changed base model to plain ones if it is asked to, and then says that they are."""
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    made = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": kind}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**made))
    first = tmp_path / "first"
    model.save_pretrained(first)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path / "plain")
    about = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    directory = tmp_path / "plain"
    if kind in ("pissa", "olora"):
        with pytest.raises(ModelError, match=r"init_lora_weights' .*path_initial_model_for_weight_conversion"):
            read_adapter(directory)
        (first / "adapter_config.json").write_text(json.dumps({**about, "init_lora_weights": True}))
        directory = tmp_path / "converted"
        model.save_pretrained(directory, path_initial_model_for_weight_conversion=str(first))
    part = read_adapter(directory).parts[NAME]
    changed = model.merge_and_unload().get_submodule(NAME).weight.detach().numpy()
    plain = AutoModelForCausalLM.from_pretrained(base).get_submodule(NAME).weight.detach().numpy()
    assert np.abs(plain + part.up @ part.down - changed).max() < 1e-5


def test_other_tensors_are_refused_by_name(adapter):
    directory = adapter()
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}, path)
    with pytest.raises(ModelError, match=r"lm_head\.weight' is not supported"):
        read_adapter(directory)
    del tensors[f"base_model.model.{NAME}.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{NAME} has no A and B of the same rank"):
        read_adapter(directory)


def test_a_rank_that_the_configuration_does_not_have_is_refused(adapter):
    with pytest.raises(ModelError, match="has rank 4, but r 8"):
        read_adapter(adapter(rank=4, config={"r": 8}))


Q_A = f"base_model.model.{NAME}.lora_A.weight"


def write_tensors(directory, change):
    """Writes the file of the weights anew, with a header that `change(header)` has changed, or has returned as text."""
    path = directory / "adapter_model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode(errors="surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def entry(**values):
    return lambda header: header[Q_A].update(values)


def text(old, new):
    return lambda header: json.dumps(header).replace(old, new)


@pytest.mark.parametrize(
    "change",
    [
        entry(dtype=3),
        entry(dtype=["F32"]),
        entry(dtype="I64"),
        entry(shape=None),
        entry(shape=4),
        entry(shape=[4, -32]),
        entry(shape=[4.0, 32]),
        entry(shape=[True, 128]),
        entry(shape=[10**30, 10**30]),
        entry(shape=[10**12, 0], data_offsets=[0, 0]),
        entry(shape=[4, 32, 1]),
        entry(data_offsets=None),
        entry(data_offsets=[0]),
        entry(data_offsets=["0", "512"]),
        entry(data_offsets=[-512, 0]),
        entry(data_offsets=[0.0, 512.0]),
        entry(data_offsets=[10**30, 10**30 + 512]),
        lambda header: header[Q_A].pop("dtype") and None,
        lambda header: header.clear(),
        lambda header: header.update({Q_A: [1]}),
        lambda header: header.update({Q_A: header[Q_A.replace("lora_A", "lora_B")]}),  # two of one place
        lambda header: header.update({"base_model.model.\ud800.lora_A.weight": header.pop(Q_A)}),
        lambda header: header.update({f"base_model.model.{'x' * 100_000}.lora_A.weight": header.pop(Q_A)}),
        lambda header: json.dumps(header)[:-1] + f', "{Q_A}": {json.dumps(header[Q_A])}}}',
        lambda header: json.dumps(header)[:-1] + ', "x": 1, "x": 2}',
        lambda header: "[" * 100_000,
        lambda header: "[]",
        lambda header: "",
        lambda header: "\ud800",
        lambda header: '{"a": ' + "9" * 5000 + "}",
        text('"F32"', "NaN"),
        lambda header: json.dumps(header) + " " * (32 << 20),
    ],
)
def test_a_hostile_header_is_refused(adapter, change):
    directory = adapter()
    write_tensors(directory, change)
    with pytest.raises(ModelError) as caught:
        read_adapter(directory)
    assert len(caught.value.message) < 1000
    assert caught.value.message.encode()


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1])
def test_a_hostile_length_of_the_header_is_refused(adapter, length):
    path = adapter() / "adapter_model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ModelError, match="damaged"):
        read_adapter(path.parent)
    path.write_bytes(b"1234")
    with pytest.raises(ModelError, match="damaged"):
        read_adapter(path.parent)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": "8"},
        {"lora_alpha": None},
        {"lora_alpha": True},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e38},
        {"r": "4"},
        {"r": [4]},
        {"use_rslora": "no"},
        {"alpha_pattern": 3},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": "x"}},
        {"alpha_pattern": {"q_proj": float("nan")}},
        {"rank_pattern": "q_proj"},
        {"alpha_pattern": {"(": 1}},
        {"alpha_pattern": {"*": 1}},
        {"alpha_pattern": {"(.*)*x": 1}},
        {"alpha_pattern": {"(.|.|.)(.|.|.)" * 20 + "x": 1}},
        {"alpha_pattern": {".*.*.*.*.*.*.*x": 1}},
        {"alpha_pattern": {"(?:a+)+x": 1}},
        {"alpha_pattern": {"[z-a]": 1}},
        {"alpha_pattern": {"": 1}},
        {"alpha_pattern": {r"(.*)\1": 1}},
        {"alpha_pattern": {f"x{n}": 1 for n in range(1025)}},
        {"modules_to_save": {"a": float("nan")}},
        {"bias": ["x" * 100_000]},
        {"\ud800" * 1000: True},
    ],
)
def test_a_hostile_configuration_is_refused(adapter, config):
    with pytest.raises(ModelError) as caught:
        read_adapter(adapter(config=config))
    assert len(caught.value.message) < 1000
    assert caught.value.message.encode()


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}', b"{}" + b" " * (32 << 20), b"", b"null"]
)
def test_a_configuration_that_is_no_object_is_refused(adapter, content):
    directory = adapter()
    (directory / "adapter_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(directory)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["A", "B"])
def test_numbers_that_are_not_finite_are_refused(adapter, part, value):
    path = adapter() / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[Q_A.replace("lora_A", f"lora_{part}")][1, 1] = value
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{NAME} has numbers that are not finite"):
        read_adapter(path.parent)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_regular_files_are_read(adapter, name):
    """Opening a pipe would wait for a writer, for ever."""
    path = adapter() / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=f"{name} is not a file"):
        read_adapter(path.parent)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"{name} is not a file"):
        read_adapter(path.parent)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=f"{name} cannot be read: Is a directory"):
        read_adapter(path.parent)
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(ModelError, match=name):
        read_adapter(path.parent)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_may_not_lead_out_of_a_root(adapter, tmp_path, name):
    """Without a root they may, since that is how a Hugging Face cache stores files."""
    path = adapter() / name
    elsewhere = path.rename(tmp_path / name)
    path.symlink_to(elsewhere)
    assert read_adapter(path.parent).parts
    assert read_adapter(path.parent, root=tmp_path).parts
    with pytest.raises(ModelError, match=f"{name} is a link to a file that is not below"):
        read_adapter(path.parent, root=path.parent)


def test_what_needs_too_much_memory_is_refused_before_it_is_read(adapter, monkeypatch):
    directory = adapter(rank=4, dtype="bfloat16")
    parts = read_adapter(directory).parts.values()
    num_bytes = sum(part.down.nbytes + part.up.nbytes for part in parts)
    assert read_adapter(directory, max_bytes=num_bytes).parts
    monkeypatch.setattr(np, "frombuffer", lambda *_: pytest.fail("tensors were read"))
    with pytest.raises(ModelError, match=rf"needs {num_bytes:,} bytes.* model\.adapter_memory_bytes"):
        read_adapter(directory, max_bytes=num_bytes - 1)


def test_a_rank_that_no_adapter_has_is_refused(adapter):
    with pytest.raises(ModelError, match=r"rank 1025.* at most 1,024"):
        read_adapter(adapter(rank=1025, targets=("k_proj",)))


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
