from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import ModelError
from outrider.model_hub.quantised.open import open_safetensors
from outrider.model_hub.safetensors_files import SafetensorsFiles

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([0.1, 3.0], dtype=torch.float16),
    "d": torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn),
    "e": torch.tensor([-7], dtype=torch.int32),
    "f": torch.tensor([True, False]),
    "g": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def directory(tmp_path):
    save_file({name: TENSORS[name] for name in "abc"}, tmp_path / "one.safetensors")
    save_file({name: TENSORS[name] for name in "defg"}, tmp_path / "two.safetensors")
    parts = {name: "one.safetensors" if name in "abc" else "two.safetensors" for name in TENSORS}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    return tmp_path


def test_tensors_of_several_files_are_views_of_them(directory):
    files = SafetensorsFiles(directory)
    assert sorted(files) == sorted(TENSORS)
    assert files.types == dict(zip("abcdefg", ("F32", "BF16", "F16", "F8_E4M3", "I32", "BOOL", "I64"), strict=True))
    for name, expected in TENSORS.items():
        found = files[name]
        assert not found.flags.owndata
        assert not found.flags.writeable
        bits = expected.view(torch.uint8 if name == "d" else torch.uint16) if name in "bd" else expected
        assert found.dtype == bits.numpy().dtype
        assert np.array_equal(found, bits.numpy())
        assert found.shape == tuple(expected.shape)


def test_plain_words_are_read_by_name(directory):
    tensors = open_safetensors(directory)
    assert sorted(tensors) == sorted(TENSORS)
    assert tensors["a"].dtype == np.float32
    assert tensors["b"].dtype == np.uint16
    assert tensors["c"].dtype == np.float32
    assert np.array_equal(tensors["c"], TENSORS["c"].float().numpy())
    assert "h" not in tensors
    with pytest.raises(KeyError):
        tensors["h"]
    with pytest.raises(ModelError, match="d has the type F8_E4M3, not float32, float16 or bfloat16"):
        tensors["d"]


def test_a_type_that_is_not_known_is_refused_by_name(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ModelError, match="w has the type F4, which is not supported"):
        SafetensorsFiles(tmp_path)["w"]


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0" * 8)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not a safetensors file: convert it"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        open_safetensors(tmp_path)


def test_a_file_without_tensors(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert len(open_safetensors(tmp_path)) == 0
