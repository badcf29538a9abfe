from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outrider.model_hub.fingerprint import SAMPLE_BYTES, SAMPLES_PER_FILE, model_fingerprint


@pytest.fixture
def directory(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3 * SAMPLE_BYTES))
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "transformers_version": "5.0", "eos_token_id": 2}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return tmp_path


def test_the_same_model_saved_by_another_version_is_the_same(directory):
    before = model_fingerprint(directory, dtype="float32")
    (directory / "config.json").write_text('{ "eos_token_id": 2, "transformers_version": "5.23", "hidden_size": 8 }')
    (directory / "README.md").write_text("not part of it")
    assert model_fingerprint(directory, dtype="float32") == before


def change(path, *, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_small_tensor_between_two_samples_of_a_large_file_counts(directory):
    large, small = 32 << 20, 1 << 12
    offsets = {"a": (0, large), "norm": (large, large + small), "b": (large + small, 2 * large + small)}
    tensors = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in offsets.items()
    }
    header = json.dumps(tensors).encode()
    path = directory / "model.safetensors"
    with path.open("wb") as file:  # sparse
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * large + small)
    stride = -(-path.stat().st_size // SAMPLES_PER_FILE)
    at = next(
        offset
        for offset in range(8 + len(header) + large, 8 + len(header) + large + small)
        if offset % stride >= SAMPLE_BYTES
    )
    before = model_fingerprint(directory, dtype="float32")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    assert model_fingerprint(directory, dtype="float32") != before


@pytest.mark.parametrize(
    "alter",
    [
        lambda directory: change(directory / "model.safetensors", offset=20),
        lambda directory: change(directory / "model.safetensors", offset=SAMPLE_BYTES + 5),
        lambda directory: change(directory / "model.safetensors", offset=-1),
        lambda directory: (directory / "model.safetensors").open("ab").write(b"x"),
        lambda directory: (directory / "model2.safetensors").write_bytes(bytes(20)),
        lambda directory: change(directory / "tokenizer.json", offset=22),
        lambda directory: (directory / "config.json").write_text('{"hidden_size": 9, "eos_token_id": 2}'),
        lambda directory: (directory / "config.json").write_text(
            '{"hidden_size": 8, "eos_token_id": 2, "quantization_config": {"quant_method": "gptq"}}'
        ),
    ],
    ids=["header", "weight", "last weight", "size", "another file", "tokenizer", "configuration", "quantization"],
)
def test_every_part_counts(directory, alter):
    before = model_fingerprint(directory, dtype="float32")
    alter(directory)
    assert model_fingerprint(directory, dtype="float32") != before


def test_the_dtype_counts(directory):
    assert model_fingerprint(directory, dtype="float32") != model_fingerprint(directory, dtype="bfloat16")


def test_configuration_and_identity_reach_no_torch():
    modules = "config vocabulary fingerprint default_model locate progress"
    script = "; ".join(f"import outrider.model_hub.{name}" for name in modules.split())
    script += "; import outrider.engine.kv_cache.config, outrider.engine.model_spec"
    script += "; import sys; sys.exit(str([name for name in ('torch', 'transformers') if name in sys.modules] or ''))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert result.stderr.strip() in ("", "[]"), result.stderr
