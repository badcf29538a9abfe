"""Packed weights: written once, mapped by every later start, and always checked before use."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider import cache_directory
from outrider.cache_directory import KEPT_SECONDS, locked
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.errors import ModelError
from outrider.model_hub import load as load_module
from outrider.model_hub import packed_weights
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.open import open_model
from outrider.model_hub.packed_weights import HEADER, WEIGHTS
from tests.support.cached_runner import CachedRunner
from tests.support.processes import run_python
from tests.support.tiny_model import make_tiny_model

NATIVE = choose_kernels()
pytestmark = pytest.mark.skipif(NATIVE.library is None, reason=str(NATIVE))
MAPPED = "packed weights, mapped"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("qwen2"), architecture="qwen2", dtype="bfloat16")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def loads(monkeypatch):
    """The configurations that were loaded from a checkpoint."""
    original, loaded = load_module.load_model, []

    def load(config, **options):
        loaded.append(config)
        return original(config, **options)

    monkeypatch.setattr(load_module, "load_model", load)
    return loaded


@pytest.fixture
def opened(tiny, cache):
    def run(path=tiny, **settings):
        return open_model(ModelConfig(id=str(path), cache_dir=str(cache), **{"num_threads": 1, **settings}))

    return run


def folders(cache):
    return sorted(path for path in (cache / "packed").iterdir() if path.is_dir())


def logits(loaded):
    return CachedRunner(loaded, num_blocks=4).prefill(range(40), range(3))


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}, {"weights": "int8"}], ids=["auto", "float32", "int8"])
def test_mapped_weights_are_those_of_the_checkpoint_to_the_last_bit(opened, tiny, loads, settings):
    expected = load_model(ModelConfig(id=str(tiny), num_threads=1, **settings))
    first, second = opened(**settings), opened(**settings)
    assert len(loads) == 1
    assert (first.weights_source, second.weights_source) == (MAPPED, MAPPED)
    for loaded in (first, second):
        assert loaded.model is None
        assert (loaded.spec, loaded.info) == (expected.spec, expected.info)
        assert np.array_equal(loaded.known_token_ids, expected.known_token_ids)
        assert np.array_equal(logits(loaded), logits(expected))
        assert not any(blob.flags.writeable for blob in loaded.native.weights.blobs.values())


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def edit(path):
    """Changes one byte of the weights in place, and restores the modification time."""
    weights = path / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 0x40
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_checkpoint_that_is_edited_in_place_is_served_with_its_new_weights(opened, copy, loads):
    before = opened(copy)
    edit(copy)
    after = opened(copy)
    assert len(loads) == 2
    assert after.info.fingerprint != before.info.fingerprint
    assert np.array_equal(logits(after), logits(load_model(ModelConfig(id=str(copy), num_threads=1))))
    assert not np.array_equal(logits(after), logits(before))


def test_weights_that_change_while_they_are_loaded_are_not_kept_as_those_before(opened, copy, cache, monkeypatch):
    original = load_module.load_model

    def load(config, **options):
        edit(copy)
        return original(config, **options)

    monkeypatch.setattr(load_module, "load_model", load)
    monkeypatch.setattr("outrider.model_hub.packed_weights._pack_apart", lambda *_: None)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        opened(copy)
    assert folders(cache) == []


def test_weights_that_change_while_they_are_loaded_are_not_named_as_those_after(tmp_path, monkeypatch):
    """Even if nothing is packed, they are refused: a node would have old weights with the fingerprint of new ones."""
    path = make_tiny_model(tmp_path / "glm4", architecture="glm4")
    original = load_module._load_weights

    def load(*arguments, **options):
        loaded = original(*arguments, **options)
        edit(path)
        return loaded

    monkeypatch.setattr(load_module, "_load_weights", load)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        load_model(ModelConfig(id=str(path), num_threads=1))


def test_a_start_from_packed_weights_reaches_no_transformers(opened, tiny, cache):
    opened()
    program = (
        "import sys\n"
        "from outrider.model_hub.config import ModelConfig\n"
        "from outrider.model_hub.open import open_model\n"
        f"loaded = open_model(ModelConfig(id={str(tiny)!r}, cache_dir={str(cache)!r}))\n"
        "print(loaded.weights_source, 'transformers' in sys.modules)"
    )
    done = run_python("-c", program)
    assert done.stdout.strip() == f"{MAPPED} False", done.stderr


def cut_short(folder):
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


def turn_a_bit(name, position):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 1
        (folder / name).write_bytes(content)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        turn_a_bit(WEIGHTS, 0),
        turn_a_bit(WEIGHTS, -1),
        turn_a_bit(HEADER, 60),
        lambda folder: (folder / HEADER).unlink(),
        lambda folder: (folder / HEADER).write_text("[]"),
        shutil.rmtree,
    ],
    ids=["cut short", "first byte", "last byte", "header", "no header", "not a header", "removed"],
)
def test_damaged_weights_are_found_and_made_again(opened, loads, cache, damage):
    expected = logits(opened())
    (folder,) = folders(cache)
    damage(folder)
    again = opened()
    assert len(loads) == 2
    assert again.weights_source == MAPPED
    assert np.array_equal(logits(again), expected)
    opened()
    assert len(loads) == 2


def test_what_the_bytes_depend_on_makes_others(opened, copy, loads, monkeypatch):
    opened(copy)
    for settings in ({"dtype": "float32"}, {"weights": "int8"}, {"max_model_len": 512}):
        before = len(loads)
        opened(copy, **settings)
        assert len(loads) == before + 1, settings
    edit(copy)
    opened(copy)
    assert len(loads) == 5
    monkeypatch.setattr(packed_weights, "_source_hash", lambda: "another version")
    opened(copy)
    assert len(loads) == 6


def test_of_one_model_only_the_versions_last_used_are_kept(opened, cache, monkeypatch):
    made = []
    for number in range(packed_weights.MAX_OLD_VERSIONS + 2):
        monkeypatch.setattr(packed_weights, "_source_hash", lambda number=number: str(number))
        opened()
        (new,) = set(folders(cache)) - set(made)
        made.append(new)
        used = time.time() - 1000 + number
        os.utime(new, (used, used))
    assert folders(cache) == sorted(made[1:])


def test_weights_that_no_node_asked_for_in_a_month_are_removed(opened, cache, tmp_path):
    opened()
    (folder,) = folders(cache)
    long_ago = time.time() - KEPT_SECONDS - 1
    os.utime(folder, (long_ago, long_ago))
    opened()  # uses it
    opened(make_tiny_model(tmp_path / "llama"))
    assert folder.exists()
    os.utime(folder, (long_ago, long_ago))
    opened(make_tiny_model(tmp_path / "qwen3", architecture="qwen3"))
    assert not folder.exists()
    assert len(folders(cache)) == 2


def test_two_nodes_that_start_at_once_pack_once(opened, loads):
    barrier = threading.Barrier(2)

    def start(_):
        barrier.wait(60)
        return opened()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(start, range(2)))
    assert len(loads) == 1
    assert [loaded.weights_source for loaded in both] == [MAPPED, MAPPED]


def test_a_cache_that_cannot_be_written_is_told_and_the_model_served(opened, cache, tiny):
    cache.parent.mkdir(exist_ok=True)
    cache.touch()  # a file where the folder should be
    loaded = opened()
    assert loaded.weights_source.startswith("checkpoint; packed weights are not kept: ")
    assert "packed" in loaded.weights_source
    assert np.array_equal(logits(loaded), logits(load_model(ModelConfig(id=str(tiny), num_threads=1))))


def test_a_full_disk_is_told_and_nothing_is_left_there(opened, cache, monkeypatch):
    monkeypatch.setattr(packed_weights.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert "No space left" in opened().weights_source or "MiB are needed" in opened().weights_source
    assert folders(cache) == []


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_there(opened, cache, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_weights.os, "fsync", fail)
    assert "No space left on device" in opened().weights_source
    assert folders(cache) == []


def test_what_native_kernels_do_not_compute_as_a_whole_is_loaded_each_time(opened, loads, cache, tmp_path):
    glm = make_tiny_model(tmp_path / "glm4", architecture="glm4")
    for settings in ({"path": glm}, {"kernels": "torch"}, {"keep_packed": False}):
        assert opened(**settings).weights_source == "checkpoint"
    assert len(loads) == 3
    assert not (cache / "packed").exists()


def test_a_model_that_fails_the_check_is_not_kept(opened, cache, monkeypatch):
    pack = load_module.pack_weights

    def wrong(*arguments, **options):
        weights = pack(*arguments, **options)
        return replace(weights, shape=replace(weights.shape, sliding_windows=(11,) * weights.shape.num_layers))

    monkeypatch.setattr(load_module, "pack_weights", wrong)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"native kernels' forward differs.*set model\.kernels to torch"):
            opened(dtype="float32")
    assert folders(cache) == []


def test_a_damaged_checkpoint_is_refused_whatever_is_packed(opened, copy):
    opened(copy)
    os.truncate(copy / "model.safetensors", 1000)
    with pytest.raises(ModelError, match="is damaged"):
        opened(copy)


def test_a_node_that_waits_too_long_for_another_serves_by_itself(opened, cache, monkeypatch):
    monkeypatch.setattr(cache_directory, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(packed_weights, "WAIT_SECONDS", 0.0)
    opened()
    (folder,) = folders(cache)
    shutil.rmtree(folder)
    (lock,) = (cache / "packed").glob("*.lock")
    with locked(lock, while_waiting=list):
        assert "has been locked by another process" in opened().weights_source


def test_marks_of_models_that_were_refused_are_removed_with_their_weights(opened, tiny, cache, monkeypatch):
    monkeypatch.setattr(packed_weights, "_source_hash", lambda: "an older version")
    key = packed_weights.PackedKey.of(ModelConfig(id=str(tiny), cache_dir=str(cache)), tiny, NATIVE)
    key.cache.mkdir(parents=True)
    key.refused.touch()
    (key.cache / "long-ago.refused").touch()
    os.utime(key.cache / "long-ago.refused", (0, 0))
    (key.cache / "another.refused").touch()
    monkeypatch.undo()
    opened()
    assert [path.name for path in key.cache.glob("*.refused")] == ["another.refused"]
