"""How prefill and decode nodes use `model.head` when they start."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from decode_node.__main__ import make_build as make_decode
from decode_node.config import DecodeNodeConfig
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.heads.checkpoint import Checkpoint
from outrider.heads.locate import DEFAULT_HEAD, head_folder
from outrider.heads.of_target import TargetHead
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.rpc.tls import PLAINTEXT
from outrider.service.config import ServerConfig
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer
from prefill_node.__main__ import make_build as make_prefill
from prefill_node.config import PrefillNodeConfig
from tests.heads import golden_files
from tests.support.tiny_head import make_tiny_head
from tests.support.tiny_model import make_tiny_model

KV_CACHE = KVCacheConfig(num_blocks=128)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model, head = make_tiny_model(folder / "model"), make_tiny_head(folder / "head")
    return ModelConfig(id=str(model), head=str(head), num_threads=1)


def open_prefill(config):
    return make_prefill(PrefillNodeConfig(kv_cache=KV_CACHE), config, PLAINTEXT)(lambda ended, stats: None)


def open_decode(config):
    node = DecodeNodeConfig(kv_cache=KV_CACHE, local_head=False)
    return make_decode(node, config, ServerConfig(), PLAINTEXT)(bytes(16), "decode", lambda *_: None)


def test_prefill_and_decode_nodes_keep_the_features_of_the_head_and_say_so(config):
    reduction = TargetHead(config).reduction(load_model(config))
    prefill, decode = open_prefill(config), open_decode(config)
    for parts, cache in ((prefill, prefill.engine.kv_cache), (decode, decode.engine.kv_cache)):
        assert cache.planes[2:] == (reduction.plane("float32"),)
        assert parts.model.features == reduction.format("float32")
        assert parts.description["features"] == f"{reduction.fingerprint[:16]} (64 numbers of float32, taps 3)"
    plain = open_prefill(replace(config, head=""))
    assert (plain.model.features, plain.description["features"]) == (None, "none")
    assert plain.model.fingerprint == prefill.model.fingerprint, "the answer does not depend on the head"


@pytest.mark.parametrize("open_node", [open_prefill, open_decode])
def test_a_head_of_another_target_is_refused_at_the_start(config, tmp_path, open_node):
    other = replace(config, head=str(make_tiny_head(tmp_path / "head", hidden_size=48)))
    with pytest.raises(ConfigError, match="made for another target: hidden_size 48 of the head, 64 of the target"):
        open_node(other)
    with pytest.raises(ConfigError, match=r"model\.head is '.*nowhere': there is no such folder"):
        open_node(replace(config, head=str(tmp_path / "nowhere"), id=str(tmp_path / "no model is looked for first")))


def test_only_the_default_model_has_a_head_of_its_own(tiny_model):
    assert head_folder(ModelConfig()) == DEFAULT_HEAD
    assert head_folder(ModelConfig(head="")) is None
    other = ModelConfig(id=str(tiny_model))
    assert head_folder(other) is None
    with pytest.raises(ConfigError, match=f"the model {tiny_model} has no built-in head"):
        make_proposer("head", ProposerSettings(model=other))


def test_the_head_in_the_package_is_small_and_says_how_it_was_made():
    checkpoint = Checkpoint.open(DEFAULT_HEAD)
    assert checkpoint.config["speculators_model_type"] == "eagle3"
    assert sum(file.stat().st_size for file in DEFAULT_HEAD.iterdir()) < 20e6
    for name in ("report.md", "training.svg", "training.txt"):
        assert (DEFAULT_HEAD / name).stat().st_size, name


def test_a_head_opens_without_transformers(tmp_path):
    """Importing it would delay a node's start by seconds."""
    golden = golden_files.unpack("eagle3-residual", tmp_path)
    program = f"""
import sys, torch
from pathlib import Path
from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
open_head(Path({str(golden.head)!r}), Target.open(Path({str(golden.target)!r})), torch.device("cpu"), torch.float32)
sys.exit("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
