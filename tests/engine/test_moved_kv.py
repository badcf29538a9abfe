from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.engine.moved_kv import MovedKV, turned
from outrider.engine.rotation import Turn
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.support.cached_runner import CachedRunner
from tests.support.tiny_model import make_tiny_model

PIECE = [3 + (11 * n) % 290 for n in range(40)]
OFFSET = 37
SCALED = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(**options):
        model = load_model(ModelConfig(id=str(make_tiny_model(tmp_path_factory.mktemp("tiny"), **options))))
        if not model.info.can_blend:
            pytest.skip("KV of this model cannot be moved here")
        return model

    return load


def layer_of(model, cache, name, slots, layer):
    taken = cache.read(name, range(layer, layer + 1), slots)
    return torch.from_numpy(taken).view(TORCH_DTYPES[model.spec.dtype]).float()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"dtype": "float32"}, 1e-5), ({"dtype": "bfloat16"}, 2**-7), ({"dtype": "float32", "overrides": SCALED}, 1e-5)],
    ids=["float32", "bfloat16", "yarn"],
)
def test_moved_keys_are_those_computed_at_their_new_positions(load, options, tolerance):
    model = load(**options)
    cached = CachedRunner(model)
    own, other = cached.table(len(PIECE)), cached.table(OFFSET + len(PIECE))
    cached.prefill(PIECE, own)
    cached.prefill([7] * OFFSET + PIECE, other)
    places, there = cached.slots(own, range(40)), cached.slots(other, range(OFFSET, OFFSET + 40))
    expected = [layer_of(model, cached.cache, name, there, 0) for name in ("k", "v")]
    unmoved = layer_of(model, cached.cache, "k", places, 0)
    assert not torch.allclose(unmoved, expected[0], rtol=0.1, atol=0.1)
    moved = MovedKV.read(cached.cache, places, cached.runner.turns(OFFSET))
    assert moved.deviations(cached.cache, there).min() > 0
    moved.write(cached.cache, there)
    assert not moved.deviations(cached.cache, there).any()
    for name, wanted in zip(("k", "v"), expected, strict=True):
        found = layer_of(model, cached.cache, name, there, 0)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_only_the_first_layers_are_computed(load):
    model = load(dtype="bfloat16", overrides={"num_hidden_layers": 4})
    cached = CachedRunner(model)
    table, own = cached.table(40), range(40)
    cached.prefill(PIECE, table)
    slots = cached.slots(table, own)
    expected = [cached.cache.read(name, range(4), slots).reshape(4, -1) for name in ("k", "v")]
    for name in ("k", "v"):
        cached.cache.write(name, range(4), slots, bytes(expected[0].nbytes))
    cached.runner.compute_layers(build_input_batch([SequenceRows(PIECE, 0, table, 0)], cached.block_size), 2)
    for name, wanted in zip(("k", "v"), expected, strict=True):
        found = cached.cache.read(name, range(4), slots).reshape(4, -1)
        assert np.array_equal(found[:2], wanted[:2])
        assert not found[2:].any()


def test_dimensions_that_are_not_rotated_stay_and_so_do_layers_without_rotation():
    plane = PlaneSpec("k", 2, 1, 6, "float32")
    keys = np.arange(2 * 3 * 6, dtype=np.float32)
    quarter = Turn(np.zeros(2, np.float32), np.ones(2, np.float32))
    found = turned(keys.copy().view(np.uint8), plane, [quarter, None]).view(np.float32).reshape(2, 3, 6)
    before = keys.reshape(2, 3, 6)
    assert np.array_equal(found[1], before[1])
    assert np.array_equal(found[0], np.concatenate([-before[0, :, 2:4], before[0, :, :2], before[0, :, 4:]], axis=1))
