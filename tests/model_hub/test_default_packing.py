"""The default model and its head packed without torch: the same bits as with torch, and their own check."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.default_packing import pack_default_head
from outrider.heads.locate import DEFAULT_HEAD
from outrider.heads.open import pack_head
from outrider.model_hub import default_packing
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.default_model import MANIFEST
from outrider.model_hub.default_packing import RECORDED_LOGITS, pack_default_model
from outrider.model_hub.kernels import start_kernels
from outrider.model_hub.load import load_model
from outrider.model_hub.locate import locate_model
from tests.model_hub.make_default_logits import default_logits
from tests.support.processes import run_python

NATIVE = choose_kernels()
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(NATIVE.library is None, reason=str(NATIVE)),
]
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of the file that transformers 5.23 writes after reading the GGUF file."""


@pytest.fixture(scope="module")
def directory():
    return locate_model(ModelConfig()).directory


@pytest.fixture(scope="module")
def kernels():
    return start_kernels(NATIVE, ModelConfig())


def assert_equal_blobs(found, expected):
    assert set(found) == set(expected)
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


def test_it_is_converted_to_the_file_that_transformers_writes(directory):
    assert json.loads((directory / MANIFEST).read_bytes())["files"]["model.safetensors"]["sha256"] == WEIGHTS_SHA256


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_model_has_the_bits_that_torch_packs(directory, kernels, weights):
    spec, packed = pack_default_model(directory, ModelConfig(weights=weights), kernels)
    expected = load_model(ModelConfig(weights=weights))
    assert spec == expected.spec
    assert packed.shape == expected.native.weights.shape
    assert_equal_blobs(packed.blobs, expected.native.weights.blobs)


def test_the_head_has_the_bits_that_torch_packs(directory, kernels):
    expected = pack_head(DEFAULT_HEAD, Target.open(directory), torch.bfloat16, kernels).as_packed()
    found = pack_default_head(DEFAULT_HEAD, directory, kernels, 8192).as_packed()
    assert found.about == expected.about
    assert_equal_blobs(found.blobs, expected.blobs)


def test_logits_are_compared_with_those_that_transformers_computes(directory, kernels, monkeypatch, tmp_path):
    recorded = json.loads(RECORDED_LOGITS.read_bytes())
    again = default_logits()
    assert again["token_ids"] == recorded["token_ids"]
    assert again["ids"] == recorded["ids"]
    np.testing.assert_allclose(again["logits"], recorded["logits"], atol=2e-3)
    wrong = tmp_path / "logits.json"
    wrong.write_text(json.dumps({**recorded, "ids": np.roll(recorded["ids"], 1, axis=0).tolist()}))
    monkeypatch.setattr(default_packing, "RECORDED_LOGITS", wrong)
    with pytest.raises(ModelError, match="differ from the default model's"):
        pack_default_model(directory, ModelConfig(), kernels)


def test_a_window_that_the_model_does_not_have_is_refused(directory, kernels):
    with pytest.raises(ConfigError, match="at most 8192"):
        pack_default_model(directory, ModelConfig(max_model_len=8193), kernels)
    assert pack_default_model(directory, ModelConfig(dtype="float32"), kernels) is None, "torch converts it"


PROGRAM = """
import sys
for name in ("torch", "transformers", "accelerate", "array_api_compat"):
    sys.modules[name] = None  # as where they are not installed
from outrider.errors import ConfigError
from outrider.heads.of_target import TargetHead
from outrider.model_hub import packed_weights
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
packed_weights.is_packer = True
config = ModelConfig(cache_dir=sys.argv[1], head="auto", num_threads=1)
model = open_model(config)
print(model.weights_source, model.info.dtype, TargetHead(config).packed(model).spec.form)
try:
    open_model(ModelConfig(cache_dir=sys.argv[1], dtype="float32", num_threads=1))
except ConfigError as error:
    print(error)
"""


def test_neither_torch_nor_transformers_need_be_installed(directory, tmp_path):
    (tmp_path / directory.name).symlink_to(directory)
    done = run_python("-c", PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    opened, refused = done.stdout.splitlines()
    assert opened == "packed weights, mapped bfloat16 eagle3"
    assert refused.startswith("model.id 'smollm2-135m-instruct' (dtype float32; native kernels: ")
    assert refused.endswith(") needs torch, which is not installed: pip install 'outrider[torch]'")
