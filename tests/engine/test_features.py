"""Features that a runner computes, compared with those that torch computes from transformers' hidden states."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.support.cached_runner import CachedRunner
from tests.support.tiny_model import ARCHITECTURES, make_tiny_model

HIDDEN, NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 64, 3, 4, 96
PROMPT = [random.Random(3).randrange(299) for _ in range(61)]
OTHER = [random.Random(4).randrange(299) for _ in range(30)]


def values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


REDUCTIONS = {
    "projected": FeatureReduction(taps=(1, 0, 2), hidden_size=HIDDEN, projection=values(48, 3 * HIDDEN, seed=1)),
    "after the last layer": FeatureReduction(taps=(NUM_LAYERS,), hidden_size=HIDDEN),
    "behind the final norm": FeatureReduction(taps=(NUM_LAYERS,), hidden_size=HIDDEN, takes_final_norm=True),
    "normalised": FeatureReduction(
        taps=(0, NUM_LAYERS),
        hidden_size=HIDDEN,
        takes_final_norm=True,
        epsilon=1e-3,
        tap_norms=values(2, HIDDEN, seed=2),
        norm=values(2 * HIDDEN, seed=3),
        projection=values(50, 2 * HIDDEN, seed=4),
        bias=values(50, seed=5),
    ),
}


@pytest.fixture(scope="module", params=itertools.product(ARCHITECTURES, ("auto", "torch")), ids="-".join)
def loaded(request, tmp_path_factory):
    architecture, kernels = request.param
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture, seed=5)
    return load_model(ModelConfig(id=str(path), kernels=kernels))


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A model whose rows have the same bits in any batch."""
    model = load_model(ModelConfig(id=str(make_tiny_model(tmp_path_factory.mktemp("model"))), dtype="bfloat16"))
    if not isinstance(model.native, NativeDecoder):
        pytest.skip("no native kernels were built")
    return model


class Node(CachedRunner):
    def __init__(self, model, reduction):
        super().__init__(
            model.with_features(reduction), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, features=reduction
        )
        self.reduction = reduction

    def features(self, table, positions):
        return super().features(self.reduction.plane_name, table, positions)

    def features_of(self, token_ids, chunk, *, num_logits=0, **options):
        """Computes a new sequence in chunks and returns its features: [num_tokens, width]."""
        table = self.table(len(token_ids))
        self.prefill(token_ids, table, chunk=chunk, num_logits=num_logits, **options)
        return self.features(table, range(len(token_ids)))


@functools.cache
def own_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


@functools.cache
def own_hidden_states(directory, token_ids):
    """Returns the states of every tap, then those after the final norm: each [num_tokens, HIDDEN]."""
    own, last = own_model(directory), []
    with torch.inference_mode(), own.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0])):
        hidden = own(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
    return [states[0] for states in (*hidden[:-1], *last, hidden[-1])]


def expected_features(model, reduction, token_ids):
    """Returns the features [num_tokens, width] of transformers' own forward pass, in float32."""
    hidden = own_hidden_states(model.directory, tuple(token_ids))
    taps = [tap + (tap == NUM_LAYERS and reduction.takes_final_norm) for tap in reduction.taps]
    return reduction(torch.cat([hidden[tap] for tap in taps], dim=-1))


def assert_close(features, expected, tolerance=1e-4):
    assert features.shape == expected.shape
    assert float((features.float() - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_row_of_a_prompt_has_the_feature_of_transformers_hidden_states(loaded, name):
    reduction = REDUCTIONS[name]
    expected = expected_features(loaded, reduction, PROMPT)
    node = Node(loaded, reduction)
    for num_logits, chunk in ((0, len(PROMPT)), (1, 7), (64, 20)):
        features = node.features_of(PROMPT, chunk, num_logits=num_logits)
        assert_close(features, expected)


def test_decode_rows_beside_others_and_trees_have_features_at_their_slots(loaded):
    reduction = REDUCTIONS["projected"]
    node = Node(loaded, reduction)
    table, other = node.table(len(PROMPT)), node.table(len(OTHER))
    node.forward(SequenceRows(PROMPT[:40], 0, table, 0))
    node.forward(SequenceRows(PROMPT[40:41], 40, table, 1), SequenceRows(OTHER, 0, other, 1))
    assert_close(node.features(other, range(len(OTHER))), expected_features(loaded, reduction, OTHER))
    drafts, parents = [7, PROMPT[42], 8, PROMPT[43]], (-1, -1, 1, 1)
    node.forward(SequenceRows([PROMPT[41], *drafts], 41, table, 5, parents))
    expected = expected_features(loaded, reduction, PROMPT)
    assert_close(node.features(table, [*range(42), 43, 45]), expected[:44])
    wrong = expected_features(loaded, reduction, [*PROMPT[:42], 7])
    assert_close(node.features(table, [42]), wrong[42:])
    slot = node.slots(table, range(46)).tolist()
    node.cache.move_slots([(slot[43], slot[42]), (slot[45], slot[43])])
    assert_close(node.features(table, range(44)), expected[:44])


def test_a_model_without_a_head_computes_the_same_and_keeps_nothing(loaded):
    node = Node(loaded, REDUCTIONS["normalised"])
    plain = Node(loaded, None)
    assert not any(plane.is_feature for plane in plain.cache.planes)
    table, own = node.table(len(PROMPT)), plain.table(len(PROMPT))
    for start, end in ((0, 40), (40, 61)):
        rows = PROMPT[start:end], start
        logits = [each.forward(SequenceRows(*rows, blocks, 5)) for each, blocks in ((node, table), (plain, own))]
        assert torch.equal(*logits)
    for plane in plain.cache.planes:
        slots = np.arange(NUM_BLOCKS * BLOCK_SIZE)
        found, expected = (each.cache.read(plane.name, range(plane.num_layers), slots) for each in (node, plain))
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_feature_has_the_same_bits_in_any_batch(bfloat16, name):
    reduction = REDUCTIONS[name]
    node = Node(bfloat16, reduction)
    alone = node.features_of(PROMPT, 1, num_logits=1)
    assert_close(alone, expected_features(bfloat16, reduction, PROMPT), tolerance=0.05)
    layers = []
    for chunk, options in ((len(PROMPT), {}), (17, {}), (61, {"on_layer_done": layers.append})):
        features = node.features_of(PROMPT, chunk, num_logits=0, **options)
        assert torch.equal(features, alone)
    assert layers == [0, 1, 2]
    table, other = node.table(len(PROMPT)), node.table(len(OTHER))
    node.forward(SequenceRows(OTHER[:-1], 0, other, 1), SequenceRows(PROMPT[:-1], 0, table, 1))
    node.forward(SequenceRows(OTHER[-1:], len(OTHER) - 1, other, 1), SequenceRows(PROMPT[-1:], 60, table, 1))
    assert torch.equal(node.features(table, range(len(PROMPT))), alone)


def test_layers_replaced_by_native_ones_reduce_natively(tmp_path):
    path = make_tiny_model(tmp_path / "model", architecture="gemma")
    model = load_model(ModelConfig(id=str(path), dtype="bfloat16"))
    if model.native is None:
        pytest.skip("no native kernels were built")
    for reduction in REDUCTIONS.values():
        node = Node(model, reduction)
        alone = node.features_of(PROMPT, 1)
        assert torch.equal(node.features_of(PROMPT, 30), alone)


def test_a_forward_that_fails_writes_no_features_and_leaves_no_hooks(loaded):
    if isinstance(loaded.native, NativeDecoder):
        pytest.skip("no hooks")
    node = Node(loaded, REDUCTIONS["projected"])

    def fail(layer):
        if layer == 1:
            raise OSError

    with pytest.raises(OSError):
        node.features_of(PROMPT[:4], 4, on_layer_done=fail)
    assert not any(bool(layer.any()) for layer in node.cache.layers(node.reduction.plane_name))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.model.modules())
    assert node.features_of(PROMPT, 20).any()


def test_a_node_computes_the_features_that_it_is_told(bfloat16):
    reduction = REDUCTIONS["projected"]
    compute = open_model_runtime(
        ModelConfig(id=str(bfloat16.directory), dtype="bfloat16", keep_packed=False),
        KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=1000),
        features=lambda _: reduction,
        on_rank_lost=print,
    )
    assert compute.kv_cache.planes == compute.model.spec.planes
    assert compute.model.spec.features == reduction.plane("bfloat16")
    compute.runner.forward(build_input_batch([SequenceRows(PROMPT[:4], 0, [0], 1)], BLOCK_SIZE))
    assert compute.kv_cache.layers(reduction.plane_name)[0][0].any()


def test_a_changed_reduction_has_another_fingerprint_and_a_moved_one_its_own():
    reduction = FeatureReduction(taps=(1,), hidden_size=4, projection=torch.eye(4) / 3)
    moved = reduction.to("cpu", torch.bfloat16)
    assert (moved.fingerprint, moved.projection.dtype) == (reduction.fingerprint, torch.bfloat16)
    narrow = replace(reduction, projection=torch.eye(4)[:2])
    assert narrow.width == 2
    assert narrow.fingerprint not in (reduction.fingerprint, replace(reduction, epsilon=1e-3).fingerprint)
    assert replace(reduction, epsilon=1e-3).fingerprint != reduction.fingerprint
