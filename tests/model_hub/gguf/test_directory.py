from __future__ import annotations

import json
import os
import threading

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.errors import ModelError
from outrider.model_hub.checkpoint import open_checkpoint
from outrider.model_hub.checkpoint_text import open_text
from outrider.model_hub.fingerprint import GGUF_TABLE
from outrider.model_hub.gguf import directory as rooms
from outrider.model_hub.gguf.directory import find_files, gguf_directory, open_directory
from outrider.model_hub.gguf.header import read_header
from router.text.tokenizer import Tokenizer
from tests.model_hub.gguf.test_families import load, logits, random_model
from tests.support.tiny_gguf import BYTES, float_values, open_gguf, write_gguf

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def original():
    return random_model("llama", {"tie_word_embeddings": False})


def eight_bits(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType | None:
    return None if values.ndim == 1 or "attn_q" in name else gguf.GGMLQuantizationType.Q8_0


def test_a_split_model_is_one(original, tmp_path):
    whole = open_gguf(write_gguf(original, tmp_path / "whole.gguf"), tmp_path / "cache")
    first = write_gguf(original, tmp_path / "split.gguf", split_max_tensors=10)
    assert first.name == "split-00001-of-00003.gguf"
    split = open_gguf(first, tmp_path / "cache")
    assert len(split.files) == 3
    assert torch.equal(logits(load(split)), logits(load(whole)))
    with pytest.raises(ModelError, match=r"a later part.*give the first part, split-00001-of-00003\.gguf"):
        find_files(split.files[1])
    split.files[2].unlink()
    with pytest.raises(ModelError, match=r"lacks split-00003-of-00003\.gguf, or user"):
        find_files(first)


def test_a_renamed_part_is_no_model(original, tmp_path):
    first = write_gguf(original, tmp_path / "split.gguf", split_max_tensors=10)
    first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"is one of 3 parts: name the first …-00001-of-00003\.gguf"):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "cache")


def test_an_adapter_is_no_model(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf", values={"general.type": "adapter"})
    with pytest.raises(ModelError, match="is a GGUF file of type adapter, not a model"):
        gguf_directory(path, tmp_path / "cache")


def test_names_of_templates_do_not_lead_out_of_the_directory(original, tmp_path):
    values = {"tokenizer.chat_template.tool_use": "a", "tokenizer.chat_template./../../../stolen": "b"}
    directory = gguf_directory(write_gguf(original, tmp_path / "tiny.gguf", values=values), tmp_path / "cache")
    assert open_text(directory)[1].chat_templates == {"tool_use": "a"}
    assert not list(tmp_path.rglob("stolen*"))


def test_a_directory_must_have_one_model(original, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    with pytest.raises(ModelError, match="has no GGUF model"):
        find_files(folder)
    first = write_gguf(original, folder / "split.gguf", split_max_tensors=10)
    (folder / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert find_files(folder)[0] == first
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has 2 GGUF models: give one of other\.gguf, split-00001-of-00003\.gguf"):
        find_files(folder)


def test_quantised_weights_stay_so_and_plain_ones_too(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf", quantise=eight_bits)
    checkpoint = open_gguf(path, tmp_path / "cache")
    values = {name: value.numpy() for name, value in original.state_dict().items()}
    assert checkpoint.tensors.keys() == values.keys()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.shape == values[name].shape
        if isinstance(tensor, GroupedWeight):
            assert np.abs(tensor.dequantise() - values[name]).max() < 0.01
        else:
            np.testing.assert_array_equal(tensor, values[name])
    assert open_checkpoint(checkpoint.directory, "cpu").format == "GGUF Q8_0, F32"
    assert json.loads((checkpoint.directory / "config.json").read_bytes())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_queries_and_keys_are_put_in_order_whatever_their_type(original, name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    path = write_gguf(
        original,
        tmp_path / "tiny.gguf",
        quantise=lambda name, values: kind if "attn_" in name and values.ndim > 1 else None,
    )
    tensors = open_gguf(path, tmp_path / "cache").tensors
    for each in ("q_proj", "k_proj", "v_proj"):
        values = original.state_dict()[f"model.layers.1.self_attn.{each}.weight"].numpy()
        expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        tensor = tensors[f"model.layers.1.self_attn.{each}.weight"]
        np.testing.assert_array_equal(float_values(tensor), expected)


def test_norms_of_gemma_lose_what_llama_cpp_adds_whatever_their_type(tmp_path):
    model = random_model("gemma3_text", {"head_dim": 32})
    path = write_gguf(model, tmp_path / "tiny.gguf", quantise=lambda *_: gguf.GGMLQuantizationType.BF16)
    tensors = open_gguf(path, tmp_path / "cache").tensors
    for name in ("model.norm.weight", "model.layers.2.self_attn.q_norm.weight"):
        expected = model.state_dict()[name].numpy()
        np.testing.assert_allclose(float_values(tensors[name]), expected, atol=0.01)


def test_a_later_start_reads_no_header(original, tmp_path, monkeypatch):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    first = gguf_directory(path, tmp_path / "cache")
    monkeypatch.setattr(rooms, "read_header", lambda *_: pytest.fail("the header was read"))
    assert gguf_directory(path, tmp_path / "cache") == first
    assert len(open_directory(first)[0]) == len(original.state_dict())


def test_another_content_has_another_directory(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    first = gguf_directory(path, tmp_path / "cache")
    write_gguf(original, path, quantise=eight_bits)
    with pytest.raises(ModelError, match="has changed since it was opened first"):
        open_directory(first)
    assert gguf_directory(path, tmp_path / "cache") != first


def test_concurrent_first_calls_write_once(original, tmp_path, monkeypatch):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    calls, found = [], []
    read = read_header
    monkeypatch.setattr(rooms, "read_header", lambda *arguments: (calls.append(arguments), read(*arguments))[1])
    threads = [
        threading.Thread(target=lambda: found.append(gguf_directory(path, tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert len(list((tmp_path / "cache/gguf").iterdir())) == 1


def test_a_failed_conversion_leaves_nothing(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf", vocabulary=BYTES | {"pre": "viking"})
    with pytest.raises(ModelError, match="'viking', which is not supported"):
        gguf_directory(path, tmp_path / "cache")
    assert list((tmp_path / "cache/gguf").iterdir()) == []


@pytest.mark.parametrize("vocabulary", [{"token_type": [1, 1]}, {"merges": ["no token"]}])
def test_a_vocabulary_that_makes_no_sense_is_refused(original, vocabulary, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf", vocabulary=BYTES | vocabulary)
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be converted"):
        gguf_directory(path, tmp_path / "cache")


def test_a_missing_value_is_named(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.other_count"))
    with pytest.raises(ModelError, match=r"the GGUF file has no llama\.block_count"):
        gguf_directory(path, tmp_path / "cache")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_named(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ModelError, match="cannot be written by user"):
        gguf_directory(path, tmp_path / "cache")


def test_damaged_files_are_named(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    content = path.read_bytes()
    for size in (3, 20, 100, 1000, len(content) - 4096):
        path.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"tiny\.gguf is (damaged|not a GGUF file)"):
            read_header(path)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + content[8:])
    with pytest.raises(ModelError, match="its version is 0x3000000, not 2 or 3"):
        read_header(path)


def test_other_types_are_refused_by_name(original, tmp_path):
    path = write_gguf(
        original,
        tmp_path / "tiny.gguf",
        quantise=lambda name, _: gguf.GGMLQuantizationType.F16 if "ffn_up" in name else None,
    )
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert content[at] == gguf.GGMLQuantizationType.F16
    path.write_bytes(content[:at] + bytes([gguf.GGMLQuantizationType.IQ2_XXS]) + content[at + 1 :])
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight are of type IQ2_XXS, which is not supported: use"):
        read_header(path)


def test_the_text_room_reads_the_files_and_adds_bos_as_the_file_says(original, tmp_path):
    path = write_gguf(
        original,
        tmp_path / "tiny.gguf",
        vocabulary=BYTES | {"add_bos_token": True, "eot_token_id": 65},
        values={"tokenizer.chat_template": TEMPLATE, "general.sampling.temp": 0.5, "general.sampling.top_k": 20},
    )
    _, text = open_text(open_gguf(path, tmp_path / "cache").directory)
    assert text.eos_token_ids == (65, 127)
    assert text.special_tokens["bos_token"] == BYTES["tokens"][0]
    assert text.default_sampling == {"temperature": 0.5, "top_k": 20}
    tokenizer = Tokenizer(text)
    assert tokenizer.special_tokens_around() == ([0], [])
    assert tokenizer.encode_now("ab", add_special_tokens=True)[0] == 0
    assert text.chat_templates == {"default": TEMPLATE}
    tokenizer.close()


def test_other_architectures_are_read_by_transformers(tmp_path):
    original = random_model("starcoder2", {"vocab_size": len(BYTES["tokens"]), "sliding_window": None})
    directory = gguf_directory(write_gguf(original, tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert not (directory / GGUF_TABLE).exists()
    read = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(read), logits(original))
    assert open_text(directory)[1].eos_token_ids == (127,)


def test_architectures_that_nobody_reads_are_refused_by_name(original, tmp_path):
    path = write_gguf(original, tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"rwkv7"))
    with pytest.raises(ModelError, match="of architecture rwkv7, which is not supported, and transformers cannot"):
        gguf_directory(path, tmp_path / "cache")
