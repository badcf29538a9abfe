from __future__ import annotations

import json
import os
import time
from functools import partial

import pytest

from outrider.errors import ModelError
from outrider.model_hub import fingerprint as fingerprint_module
from outrider.model_hub.fingerprint import cached_sha256, file_sha256, weight_files

WEIGHT_BYTES = 200_000


@pytest.fixture
def directory(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(WEIGHT_BYTES))
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "transformers_version": "5.0", "eos_token_id": 2}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return tmp_path


@pytest.fixture
def model_fingerprint(tmp_path_factory):
    return partial(fingerprint_module.model_fingerprint, cache=tmp_path_factory.mktemp("cache"))


def test_the_same_model_saved_by_another_version_is_the_same(directory, model_fingerprint):
    before = model_fingerprint(directory, dtype="float32")
    (directory / "config.json").write_text('{ "eos_token_id": 2, "transformers_version": "5.23", "hidden_size": 8 }')
    (directory / "README.md").write_text("not part of it")
    assert model_fingerprint(directory, dtype="float32") == before


def change(path, *, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "alter",
    [
        lambda directory: change(directory / "model.safetensors", offset=20),
        lambda directory: change(directory / "model.safetensors", offset=WEIGHT_BYTES // 2 + 5),
        lambda directory: change(directory / "model.safetensors", offset=-1),
        lambda directory: (directory / "model.safetensors").open("ab").write(b"x"),
        lambda directory: change(directory / "tokenizer.json", offset=22),
        lambda directory: (directory / "config.json").write_text('{"hidden_size": 9, "eos_token_id": 2}'),
        lambda directory: (directory / "config.json").write_text(
            '{"hidden_size": 8, "eos_token_id": 2, "quantization_config": {"quant_method": "gptq"}}'
        ),
    ],
    ids=["header", "weight", "last weight", "size", "tokenizer", "configuration", "quantization"],
)
def test_every_part_counts(directory, alter, model_fingerprint):
    before = model_fingerprint(directory, dtype="float32")
    alter(directory)
    assert model_fingerprint(directory, dtype="float32") != before


def test_the_dtype_counts(directory, model_fingerprint):
    assert model_fingerprint(directory, dtype="float32") != model_fingerprint(directory, dtype="bfloat16")


@pytest.fixture
def remembering(monkeypatch):
    """Lets hashes of new files be cached at once, and returns the list of files that are read."""
    read = []
    monkeypatch.setattr(fingerprint_module, "MIN_CACHED_AGE_SECONDS", -1e9)
    monkeypatch.setattr(fingerprint_module, "file_sha256", lambda path: read.append(path) or file_sha256(path))
    return read


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path, remembering):
    path = tmp_path / "weights"
    path.write_bytes(b"before")
    assert cached_sha256(path, tmp_path) == cached_sha256(path, tmp_path) == file_sha256(path)
    assert len(remembering) == 1
    before, deadline = path.stat(), time.monotonic() + 30
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
        assert time.monotonic() < deadline
        path.write_bytes(b"behind")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached_sha256(path, tmp_path) == file_sha256(path)
    other = tmp_path / "other"
    other.write_bytes(b"before")
    other.replace(path)
    assert cached_sha256(path, tmp_path) == file_sha256(path)
    assert len(remembering) == 3


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path, remembering, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "MIN_CACHED_AGE_SECONDS", 60.0)
    path = tmp_path / "weights"
    path.write_bytes(b"before")
    assert cached_sha256(path, tmp_path) == cached_sha256(path, tmp_path)
    assert len(remembering) == 2


@pytest.mark.parametrize("spoil", [lambda memory: memory.write_text("x"), lambda memory: memory.write_bytes(b"\xff")])
def test_a_memory_that_is_damaged_or_no_directory_costs_the_reading(tmp_path, remembering, spoil):
    path = tmp_path / "weights"
    path.write_bytes(b"before")
    cached_sha256(path, tmp_path)
    for memory in (tmp_path / "hashes").iterdir():
        spoil(memory)
    assert cached_sha256(path, tmp_path) == file_sha256(path)
    assert cached_sha256(path, path) == file_sha256(path)


def test_weight_files_are_those_that_transformers_loads(directory, model_fingerprint):
    """Mistral's repositories also have the weights as consolidated.safetensors, in addition to the shards."""
    before = model_fingerprint(directory, dtype="float32")
    (directory / "consolidated.safetensors").write_bytes(bytes(20))
    assert model_fingerprint(directory, dtype="float32") == before
    (directory / "model.safetensors").rename(directory / "b.safetensors")
    with pytest.raises(ModelError, match="has no weights"):
        weight_files(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}')
    with pytest.raises(ModelError, match=r"names a\.safetensors, which is missing"):
        weight_files(directory)
    (directory / "a.safetensors").write_bytes(bytes(20))
    assert [path.name for path in weight_files(directory)] == ["a.safetensors", "b.safetensors"]
    index.write_text('{"weight_map": {"x": 1}}')
    with pytest.raises(ModelError, match="has no weight_map"):
        weight_files(directory)


def test_weights_that_the_configuration_names_are_those_that_count(directory, model_fingerprint):
    """transformers loads the file in `transformers_weights` of config.json instead of model.safetensors."""
    (directory / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    with pytest.raises(ModelError, match=r"has no weights: expected other\.safetensors"):
        weight_files(directory)
    (directory / "other.safetensors").write_bytes(b"before")
    before = model_fingerprint(directory, dtype="float32")
    change(directory / "model.safetensors", offset=-1)
    assert model_fingerprint(directory, dtype="float32") == before
    change(directory / "other.safetensors", offset=-1)
    assert model_fingerprint(directory, dtype="float32") != before
    (directory / "config.json").write_text('{"transformers_weights": "parts.safetensors.index.json"}')
    (directory / "parts.safetensors.index.json").write_text('{"weight_map": {"x": "other.safetensors"}}')
    assert weight_files(directory) == [directory / "other.safetensors"]
