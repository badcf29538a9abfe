"""Prefill and decode nodes never import torch, not even to pack weights, if kernels compute their drafter head."""

from __future__ import annotations

import json
import os
import sys

import pytest

from outrider.engine.cpu_kernels.library_cache import LIBRARIES_VARIABLE, libraries_directory
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.model_hub import packed_weights
from outrider.model_hub.config import ModelConfig
from tests.support.processes import run_python
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.tiny_model import make_tiny_model

PROGRAM = """
import json, sys
import numpy as np
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.rpc.tls import PLAINTEXT
from prefill_node.__main__ import make_build
from prefill_node.config import PrefillNodeConfig
from tests.decode_node.tiny_node import PROMPT, TinyNode

model, head = sys.argv[1:]
config = PrefillNodeConfig(kv_cache=KVCacheConfig(num_blocks=256))
prefill = make_build(config, ModelConfig(id=model, head=head, num_threads=1), PLAINTEXT)(lambda ended, stats: None)
prefill.engine.runner.forward(build_input_batch([SequenceRows(PROMPT, 0, [3], 0)], 16))
(plane,) = (plane for plane in prefill.engine.kv_cache.planes if plane.is_feature)
assert prefill.engine.kv_cache.read(plane.name, range(1), np.arange(48, 48 + len(PROMPT))).any()

node = TinyNode(model, head=head, draft_rows="all")
groups = [node.open(sampling=sampling) for sampling in ({"n": 2, "temperature": 1.0}, {})]
node.run()
print(json.dumps([node.parts.model.proposer, node.num_drafted, node.tokens(groups[1]), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def run_both_nodes(tmp_path_factory):
    """`run_both_nodes()` opens both nodes, drafts and verifies in a new process. All processes share a cache."""
    choice = choose_kernels()
    if choice.library is None:
        pytest.skip(str(choice))
    folder = tmp_path_factory.mktemp("nodes")
    model = make_tiny_model(folder / "model", dtype="bfloat16")
    head, _ = make_random_eagle3(folder, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    kept = {"OUTRIDER_CACHE_DIR": str(folder / "cache"), LIBRARIES_VARIABLE: str(libraries_directory())}

    def run():
        done = run_python("-c", PROGRAM, model, head, env={**os.environ, **kept})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_nodes_with_a_packed_head_draft_and_verify_without_torch(run_both_nodes):
    *expected, has_torch = run_both_nodes()
    assert not has_torch, "another process packs"
    *found, has_torch = run_both_nodes()
    assert not has_torch
    assert found == expected
    proposer, num_drafted, tokens = found
    assert proposer == "eagle3:head"
    assert num_drafted > len(tokens) == 40


def test_what_cannot_be_packed_is_told_by_the_process_that_asked(tmp_path):
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    program = f"""
from outrider.errors import ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
try:
    open_model(ModelConfig(id={str(model)!r}, cache_dir={str(tmp_path / "cache")!r}))
except ModelError as error:
    print("refused:", error)
"""
    done = run_python("-c", program)
    assert done.stdout.startswith("refused: "), done.stderr
    assert str(model) in done.stdout


OPEN = """
import sys
from outrider.heads.of_target import TargetHead
from outrider.model_hub import packed_weights
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
{before}
config = ModelConfig(id=sys.argv[1], head=sys.argv[2], cache_dir=sys.argv[3])
model = open_model(config)
packed = TargetHead(config).packed(model)
print(model.weights_source, "|", packed is not None, "torch" in sys.modules)
"""


@pytest.fixture
def open_in_new_process(tmp_path):
    """`open_in_new_process(before)` opens a model and its head in a new process, after running `before` in it."""
    if choose_kernels().library is None:
        pytest.skip("there are no kernels to pack for")
    model = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    head, _ = make_random_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])

    def run(before="", *, has_head=True):
        program = OPEN.replace("{before}", before)
        done = run_python("-c", program, model, head if has_head else "", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    run.cache = tmp_path / "cache" / "packed"
    return run


WITHOUT_TORCH = "packed weights, mapped | True False"


def test_a_head_that_comes_later_and_damaged_weights_are_packed_without_torch(open_in_new_process):
    assert open_in_new_process(has_head=False) == "packed weights, mapped | False False"
    assert open_in_new_process() == WITHOUT_TORCH
    for weights in open_in_new_process.cache.glob("*/weights"):
        weights.write_bytes(weights.read_bytes()[:-1])
    assert open_in_new_process() == WITHOUT_TORCH


def test_a_node_packs_by_itself_what_no_other_process_has_packed(open_in_new_process):
    """The packer is replaced by a module that prints text and ends with status 0 without packing."""
    assert open_in_new_process("packed_weights.PACKER = 'this'") == "packed weights, mapped | True True"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PACKER", "antigravity_that_is_not_there", "status 1"),
        ("executable", "/nowhere/python", "No such file or directory: '/nowhere/python'"),
    ],
)
def test_a_packer_that_fails_is_told(monkeypatch, capfd, name, value, problem):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(packed_weights if name == "PACKER" else sys, name, value)
    packed_weights._pack_apart(ModelConfig(), pytest.fail)
    told = capfd.readouterr().err
    assert f"{problem}): this process packs the weights itself" in told
