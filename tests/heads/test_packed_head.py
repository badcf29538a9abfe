"""A head is packed for native kernels once; later starts map the packed file and verify it."""

from __future__ import annotations

import errno
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.errors import InternalError, ModelError
from outrider.heads import of_target
from outrider.heads import open as open_module
from outrider.heads.checkpoint import Target
from outrider.heads.module_steps import ModuleHeadSteps
from outrider.heads.of_target import TargetHead, open_packed_head
from outrider.heads.open import open_head, read_reduction
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.open import open_model
from outrider.request import SamplingParams
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.head_forward import HeadForward, confidences_of
from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, make_head_proposer
from outrider.speculation.proposers.native_head import NativeHeadSteps
from tests.heads.golden_heads import rewrite_config, rewrite_tensors
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.tiny_head import make_tiny_head
from tests.support.tiny_model import make_tiny_model

NATIVE = choose_kernels()
pytestmark = pytest.mark.skipif(NATIVE.library is None, reason=str(NATIVE))
BLOCK_SIZE, NUM_ROWS, VOCAB_SIZE, HIDDEN = 16, 40, 320, 64


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target"), dtype="bfloat16")


@pytest.fixture
def head_path(tmp_path):
    return make_random_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])[0]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_target(model_path, cache):
    def run(path=model_path, **settings):
        return open_model(ModelConfig(id=str(path), cache_dir=str(cache), num_threads=1, **settings))

    return run


@pytest.fixture
def packs(monkeypatch):
    """The folders of heads that were packed."""
    original, packed = open_module.pack_head, []

    def pack(folder, *others):
        packed.append(folder)
        return original(folder, *others)

    monkeypatch.setattr(open_module, "pack_head", pack)
    return packed


def folders(cache):
    return {path for path in (cache / "packed").iterdir() if path.is_dir()}


def run(head, model, values):
    """Returns the drafts after each row of features `values` [NUM_ROWS, HIDDEN], one token each, and their logits."""
    kv_cache = PagedKVCache(head.spec.planes, num_blocks=3, block_size=BLOCK_SIZE, kernels=model.cpu_kernels)
    batch = build_input_batch([SequenceRows(list(range(NUM_ROWS)), 0, (2, 0, 1), NUM_ROWS)], BLOCK_SIZE)
    values = values.to(model_dtype(model))
    features = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    steps = NativeHeadSteps(head, model.cpu_kernels, kv_cache, model.known_token_ids)
    params = SamplingParams(seed=0, max_tokens=99, temperature=0.0)
    greedy = model.open_sampler().start(params, sample=0, prompt_token_ids=())
    paths = [PathRows((0,), 0, (), greedy, num_decisions=1)] * NUM_ROWS
    return steps.draft(batch, features.numpy(), paths, wants_logits=True)


def random_features():
    return torch.randn((NUM_ROWS, HIDDEN), generator=torch.Generator().manual_seed(2))


def drafts(head, model):
    """Returns (states, logits) of NUM_ROWS rows."""
    drafted, logits = run(head, model, random_features())
    return np.stack([each.state for each in drafted]), logits


def model_dtype(model):
    return getattr(torch, model.spec.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "fc_norm": True, "norm_output": True}], ids=str)
def test_a_mapped_head_is_that_of_the_checkpoint_to_the_last_bit(open_target, packs, tmp_path, dtype, flags):
    head_path, _ = make_random_eagle3(tmp_path / "made", eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    norms = {f"fc_norm.{tap}.weight": torch.rand(HIDDEN) for tap in range(3)}
    if flags:
        rewrite_config(head_path, **flags)
        rewrite_tensors(head_path, lambda tensors: tensors | norms | {"input_norm.weight": torch.rand(3 * HIDDEN)})
    model = open_target(dtype=dtype)
    expected = load_head(head_path, HeadTarget.of(model)).pack(model.cpu_kernels)
    first, second = (open_packed_head(head_path, model) for _ in range(2))
    assert packs == [head_path]
    reduction = read_reduction(head_path, Target.open(model.directory))
    assert TargetHead(ModelConfig(head=str(head_path))).reduction(model).format(dtype) == reduction.format(dtype)
    packed = reduction.pack(model.cpu_kernels, expected.reduction.element_type)
    parts = {"projection.packed", *(("norm", "tap_norms") if flags else ())}
    assert set(packed.blobs) == {f"reduction.{part}" for part in parts}
    for head in (first, second):
        assert head.spec == expected.spec
        assert head.weights.shape == expected.weights.shape
        for found, other in ((head.weights, expected.weights), (head.reduction, packed)):
            for name, blob in other.blobs.items():
                assert np.array_equal(found.blobs[name], blob), name
                assert not found.blobs[name].flags.writeable
        assert (head.reduction.plane(dtype), head.reduction.epsilon) == (reduction.plane(dtype), reduction.epsilon)
        for found, other in zip(drafts(head, model), drafts(expected, model), strict=True):
            assert np.array_equal(found, other)


def test_what_the_bytes_depend_on_makes_another(open_target, head_path, packs, tmp_path):
    model = open_target()
    other = open_target(make_tiny_model(tmp_path / "other", dtype="bfloat16", seed=9))
    open_packed_head(head_path, model)
    for target in (open_target(dtype="float32"), open_target(weights="int8"), other):
        before = len(packs)
        open_packed_head(head_path, target)
        assert len(packs) == before + 1
    rewrite_tensors(head_path, lambda tensors: tensors | {"norm.weight": 2 * tensors["norm.weight"]})
    changed = open_packed_head(head_path, model)
    assert len(packs) == 5
    assert np.array_equal(
        changed.weights.blobs["final_norm"].view(np.float32),
        open_head(head_path, Target.open(model.directory), torch.device("cpu"), torch.bfloat16)._norm.float(),
    )
    rewrite_config(head_path, norm_output=True)
    assert open_packed_head(head_path, model).weights.shape.keeps_normalised
    assert len(packs) == 6


def test_a_head_that_is_replaced_while_it_is_packed_is_not_kept(open_target, head_path, cache, monkeypatch):
    model, pack = open_target(), open_module.pack_head
    before = folders(cache)

    def replaced(folder, *others):
        rewrite_config(head_path, norm_output=True)
        return pack(folder, *others)

    monkeypatch.setattr(open_module, "pack_head", replaced)
    assert open_packed_head(head_path, model) is None
    assert folders(cache) == before


def test_a_head_that_cannot_be_read_is_a_models_error(open_target, head_path, monkeypatch):
    model, opened = open_target(), Path.open

    def failing(path, *args, **options):
        if path.name == "model.safetensors" and path.parent == head_path:
            raise OSError(errno.EIO, "no luck", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(ModelError, match="no luck"):
        open_packed_head(head_path, model)


@pytest.mark.parametrize(
    "features", [np.zeros((2, HIDDEN // 2), np.uint16), np.zeros((2, HIDDEN), np.float32)], ids=["width", "dtype"]
)
def test_features_of_another_reduction_never_reach_the_kernels(open_target, head_path, features):
    model = open_target()
    head = open_packed_head(head_path, model)
    kv_cache = PagedKVCache(head.spec.planes, num_blocks=1, block_size=BLOCK_SIZE, kernels=model.cpu_kernels)
    with pytest.raises(InternalError, match="features are"):
        NativeHeadSteps(head, model.cpu_kernels, kv_cache, model.known_token_ids).rows(features)


def test_a_large_head_is_not_read_into_memory_to_be_known(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        of_target._content_hash(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_head_that_torch_computes_has_as_many_threads_as_its_packed_target(open_target, head_path, tmp_path):
    medusa, before = make_tiny_head(tmp_path / "medusa"), torch.get_num_threads()
    target = HeadTarget.of(open_target())
    try:
        torch.set_num_threads(3)
        make_head_proposer(load_head(head_path, target), target)
        assert torch.get_num_threads() == 3, "kernels have their own"
        make_head_proposer(load_head(medusa, target), target)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_target_that_torch_computes_keeps_its_threads(model_path):
    assert HeadTarget.of(load_model(ModelConfig(id=str(model_path), kernels="torch", num_threads=1))).num_threads == 0


def test_what_torch_computes_is_not_packed(open_target, head_path, cache, tmp_path):
    medusa, plain = make_tiny_head(tmp_path / "medusa"), open_target()
    before = folders(cache)
    for model, path in (
        (plain, medusa),
        (open_target(keep_packed=False), head_path),
        (open_target(kernels="torch"), head_path),
    ):
        assert open_packed_head(path, model) is None
        reduction = read_reduction(path, Target.open(model.directory))
        assert TargetHead(ModelConfig(head=str(path))).reduction(model).fingerprint == reduction.fingerprint
    assert folders(cache) == before


def test_a_packed_heads_confidence_is_its_largest_probability_and_0_after_nan(open_target, head_path):
    model = open_target()
    head = open_packed_head(head_path, model)
    found, logits = run(head, model, random_features())
    expected = torch.softmax(torch.from_numpy(logits), 1).amax(1).tolist()
    assert [each.confidence for each in found] == pytest.approx(expected, rel=1e-5)
    found, _ = run(head, model, torch.full((NUM_ROWS, HIDDEN), torch.nan))
    assert [each.confidence for each in found] == [0.0] * NUM_ROWS


def test_a_heads_confidence_is_its_largest_probability(open_target, head_path):
    model = open_target()
    head = load_head(head_path, HeadTarget.of(model))
    forward = HeadForward.of(head, num_cached_tokens=64, known_token_ids=model.known_token_ids)
    assert isinstance(forward.steps, ModuleHeadSteps)
    logits = 9 * np.random.default_rng(0).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    outside = np.setdiff1d(np.arange(VOCAB_SIZE), forward.steps.target_ids)
    logits[:, outside], logits[2], logits[3, forward.steps.target_ids[0]] = -np.inf, np.nan, np.inf
    temperatures = np.array([[1.0], [0.5], [1.0], [1.0]], dtype=np.float32)
    expected = torch.softmax(torch.from_numpy(logits[:2] / [[1.0], [0.5]]), 1).amax(1)
    found = confidences_of(logits, temperatures, forward.steps.target_ids)
    assert found.dtype == np.float64
    in_torch = confidences_of(*map(torch.tensor, (logits, temperatures, forward.steps.target_ids)))
    assert in_torch.numpy() == pytest.approx(found, rel=1e-6)
    assert found[:2] == pytest.approx(expected.numpy(), rel=1e-5)
    assert found[2:].tolist() == [0.0, 0.0]


def test_features_of_any_dtype_are_fed_to_a_head_that_torch_computes(open_target, head_path):
    model = open_target()
    head = load_head(head_path, replace(HeadTarget.of(model), kernels=None))
    steps = ModuleHeadSteps(head, None, device="cpu", kernels=None)
    values = torch.tensor([[0.5, -3.25], [1e30, 0.0]])
    for given in (values.numpy(), values.to(torch.bfloat16).view(torch.uint16).numpy(), values.to(torch.bfloat16)):
        fed = steps.rows(given)
        assert fed.dtype == torch.float32
        assert torch.allclose(fed, values, rtol=0.01)
