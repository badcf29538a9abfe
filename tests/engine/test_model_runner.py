"""Our forward pass over the paged cache, compared with transformers' own, for tiny models."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.cpu_kernels.library import STEP_PHASES
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.model_runner import warm_up
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.support.cached_runner import CachedRunner
from tests.support.tiny_model import make_tiny_model

BLOCK_SIZE = 4
ARCHITECTURES = ("llama", "gemma2")  # without and with windows and soft caps; docs/models.md has all
PROMPT = [random.Random(3).randrange(299) for _ in range(61)]
OTHER = [random.Random(4).randrange(299) for _ in range(30)]


@pytest.fixture(scope="module", params=itertools.product(ARCHITECTURES, ("auto", "torch")), ids="-".join)
def loaded(request, tmp_path_factory):
    architecture, kernels = request.param
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture, seed=5)
    return load_model(ModelConfig(id=str(path), kernels=kernels))


@pytest.fixture
def node(loaded):
    return CachedRunner(loaded, block_size=BLOCK_SIZE)


@functools.cache
def own_model(directory):
    """Loads the same checkpoint with transformers' own attention and linear layers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def reference_logits(loaded, token_ids):
    with torch.inference_mode():
        return own_model(loaded.directory)(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def assert_same(logits, expected):
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    scale = float(expected.abs().max())
    assert float((logits - expected).abs().max()) < 2e-5 * scale
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, len(PROMPT)])
def test_a_prompt_in_chunks_of_any_size_gives_the_logits_of_transformers_own_forward(loaded, node, chunk):
    assert_same(node.prefill(PROMPT, node.table(len(PROMPT)), chunk=chunk), reference_logits(loaded, PROMPT))


def test_sequences_in_one_batch_do_not_see_each_other(loaded, node):
    first, second = node.table(len(PROMPT)), node.table(len(OTHER))
    node.prefill(PROMPT[:56], first)
    logits = node.forward(
        SequenceRows(PROMPT[56:], 56, first, 5),  # a verification of four drafts
        SequenceRows(OTHER[:29], 0, second, 0),  # a chunk of a prompt, without logits
    )
    assert_same(logits, reference_logits(loaded, PROMPT)[56:])
    logits = node.forward(SequenceRows(OTHER[29:], 29, second, 1), SequenceRows(PROMPT[60:], 60, first, 1))
    assert_same(logits, torch.stack([reference_logits(loaded, OTHER)[-1], reference_logits(loaded, PROMPT)[-1]]))


def test_a_rejected_draft_leaves_nothing_behind(loaded, node):
    blocks = node.table(len(PROMPT))
    node.prefill(PROMPT[:40], blocks)
    node.forward(SequenceRows([PROMPT[40], 7, 8, 9, 10], 40, blocks, 5))  # all four drafts are wrong
    rewritten = node.forward(SequenceRows(PROMPT[41:46], 41, blocks, 5))
    assert_same(rewritten, reference_logits(loaded, PROMPT)[41:46])

    fresh = node.table(46)
    node.prefill(PROMPT[:46], fresh)
    for plane in node.cache.planes:
        rolled_back, prefilled = (
            torch.from_numpy(node.cache.read(plane.name, range(plane.num_layers), node.slots(table, range(46)))).view(
                torch.float32
            )
            for table in (blocks, fresh)
        )
        torch.testing.assert_close(rolled_back, prefilled, rtol=1e-4, atol=1e-4)


def test_a_tree_of_drafts_is_verified_in_one_pass(loaded, node):
    """The right tokens have siblings. After the verification, the right tokens' keys and values are moved together."""
    blocks = node.table(len(PROMPT))
    node.prefill(PROMPT[:40], blocks)
    token_ids, parents = [PROMPT[40], 7, PROMPT[41], 8, PROMPT[42], 9, PROMPT[43]], (-1, -1, 0, 1, 1, 3)
    logits = node.forward(
        SequenceRows(OTHER, 0, node.table(len(OTHER)), 1), SequenceRows(token_ids, 40, blocks, 7, parents)
    )
    assert_same(logits[[0]], reference_logits(loaded, OTHER)[-1:])
    assert_same(logits[[1, 3, 5, 7]], reference_logits(loaded, PROMPT)[40:44])
    wrong = [*PROMPT[:41], 7, 8]
    assert_same(logits[[2, 4]], reference_logits(loaded, wrong)[41:])
    slot = node.slots(blocks, range(len(PROMPT))).tolist()
    node.cache.move_slots([(slot[42], slot[41]), (slot[44], slot[42]), (slot[46], slot[43])])
    assert_same(node.forward(SequenceRows(PROMPT[44:50], 44, blocks, 6)), reference_logits(loaded, PROMPT)[44:50])


def test_kv_that_came_over_the_wire_serves_as_well_as_computed(loaded, node):
    blocks = node.table(len(PROMPT))
    node.prefill(PROMPT[:-1], blocks)
    other = CachedRunner(loaded, num_blocks=30, block_size=3)
    table = list(range(29, 29 - 21, -1))
    for plane in node.cache.planes:
        for start in range(0, 60, 25):
            tokens = range(start, min(60, start + 25))
            taken = node.slots(blocks, tokens)
            placed = other.slots(table, tokens)
            for layers in (range(1), range(1, plane.num_layers)):
                other.cache.write(plane.name, layers, placed, node.cache.read(plane.name, layers, taken).data)
    assert_same(other.forward(SequenceRows(PROMPT[-1:], 60, table, 1)), reference_logits(loaded, PROMPT)[-1:])


def test_each_layer_is_reported_when_its_kv_is_in_the_cache(loaded, node):
    blocks = node.table(10)
    slots = node.slots(blocks, range(10))
    seen = {}

    def keys_of(layer):
        (group,) = (each for each in node.cache.layer_groups if layer in each.layers)
        return node.cache.read(group.plane_names[0], group.places(range(layer, layer + 1)), slots)

    node.forward(
        SequenceRows(PROMPT[:10], 0, blocks, 0),
        on_layer_done=lambda layer: seen.__setitem__(layer, keys_of(layer)),
    )
    assert list(seen) == list(range(loaded.spec.num_layers))
    for layer, keys in seen.items():
        assert (keys == keys_of(layer)).all()
        assert keys.any()


def test_warming_up_changes_no_answer(loaded, node):
    warm_up(node.runner, node.cache, loaded.spec.max_model_len)
    assert_same(node.prefill(PROMPT, node.table(len(PROMPT))), reference_logits(loaded, PROMPT))


def test_two_runners_share_a_model(loaded, node):
    other = CachedRunner(loaded, block_size=BLOCK_SIZE)
    blocks, other_blocks = node.table(61), other.table(30)
    node.prefill(PROMPT[:-1], blocks)
    other.prefill(OTHER[:-1], other_blocks)
    assert_same(node.forward(SequenceRows(PROMPT[-1:], 60, blocks, 1)), reference_logits(loaded, PROMPT)[-1:])
    assert_same(other.forward(SequenceRows(OTHER[-1:], 29, other_blocks, 1)), reference_logits(loaded, OTHER)[-1:])


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
def test_a_native_forward_tells_its_phases_while_it_is_asked(tmp_path):
    model = load_model(ModelConfig(id=str(make_tiny_model(tmp_path / "model"))))
    node = CachedRunner(model)
    phases, rows = node.runner.phases, SequenceRows([1, 2, 3], 0, [0], num_logits=1)
    node.forward(rows)
    assert not any(phases.take().values())
    phases.start()
    node.forward(rows)
    spent = phases.take()
    assert set(spent) == set(STEP_PHASES)
    assert all(nanoseconds > 0 for nanoseconds in spent.values())
    phases.stop()
    node.forward(rows)
    assert not any(phases.take().values())
