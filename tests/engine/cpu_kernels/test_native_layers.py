"""Native layers in models of several architectures: right results, and the same bits in every batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.constraints.grammar import NUMERICS
from outrider.engine.cpu_kernels import modules
from outrider.engine.cpu_kernels.modules import NativeLayers, NativeLinear, NativeRMSNorm
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.numerics import KERNELS_REVISION, LAYERS_REVISION
from outrider.model_hub import load as load_module
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.support.cached_runner import CachedRunner
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")

NUM_TOKENS = 60
TOLD = {"float32": "exact up to ties", "bfloat16": "batch-dependent"}
BLOCKS = ([3, 4, 5, 6], [9, 8, 20, 11], [13, 14, 15, 16])


def numerics(promise, kernels):
    return f"{promise} ({kernels.arithmetic} {KERNELS_REVISION}, by layers {LAYERS_REVISION}, {NUMERICS})"


def load_by_layers(directory, dtype="auto"):
    """Loading compares the logits with those of the original model's own forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "decoder_options", lambda _config: "this test wants layers")
        model = load_model(ModelConfig(id=str(directory), dtype=dtype))
    assert isinstance(model.native, NativeLayers)
    return model


@pytest.fixture(scope="module", params=itertools.product(("gemma2", "qwen3"), ("float32", "bfloat16")), ids="-".join)
def loaded(request, tmp_path_factory):
    architecture, dtype = request.param
    directory = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture)
    model = load_by_layers(directory, dtype)
    assert model.info.numerics == numerics("exact", model.kernels)
    return model


@pytest.fixture
def node(loaded):
    node = CachedRunner(loaded)
    assert node.runner.attention_name == "native"
    return node


def random_ids(count):
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def rows_of(token_ids, start, end, blocks):
    return SequenceRows(token_ids[start:end], start, blocks, end - start)


def test_linear_layers_and_norms_are_replaced(loaded):
    kinds = [type(module) for module in loaded.model.modules()]
    assert torch.nn.Linear not in kinds
    assert kinds.count(NativeLinear) >= 4 * loaded.spec.num_layers
    assert kinds.count(NativeRMSNorm) >= 2 * loaded.spec.num_layers + 1
    assert not [kind for kind in kinds if "RMSNorm" in kind.__name__ and kind is not NativeRMSNorm]


def test_a_row_has_the_same_bits_in_every_batch(node):
    token_ids = random_ids(NUM_TOKENS)
    whole = node.prefill(token_ids, BLOCKS[0])
    for size in (1, 5, 7):
        assert torch.equal(node.prefill(token_ids, BLOCKS[1], chunk=size), whole), f"in chunks of {size}"
    mixed = node.forward(
        rows_of(token_ids, 30, 35, BLOCKS[1]),
        rows_of(token_ids, 0, NUM_TOKENS, BLOCKS[2]),
        rows_of(token_ids, NUM_TOKENS - 1, NUM_TOKENS, BLOCKS[0]),
    )
    assert torch.equal(mixed[:5], whole[30:35])
    assert torch.equal(mixed[5:-1], whole)
    assert torch.equal(mixed[-1], whole[-1])


def test_a_trace_names_the_kernels(tmp_path):
    model = load_by_layers(make_tiny_model(tmp_path, architecture="gemma"))
    node = CachedRunner(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        node.prefill(random_ids(5), BLOCKS[0])
    names = {event.key for event in profile.key_averages()}
    assert {"outrider_linear", "outrider_rms_norm", "outrider_paged_attention"} <= names


@pytest.mark.parametrize("width", [1504, 1500])
def test_activations_of_many_rows_and_odd_widths_are_the_same_bits_too(tmp_path, width):
    """At these widths torch divides an activation among threads, and the last vector of a row is incomplete."""
    torch.set_num_threads(3)
    directory = make_tiny_model(tmp_path, architecture="gemma", overrides={"intermediate_size": width})
    model = load_by_layers(directory, "float32")
    assert model.info.numerics == numerics("exact", model.kernels)
    node, token_ids = CachedRunner(model), random_ids(250)
    whole = node.prefill(token_ids, range(16))
    for size in (1, 5, 77):
        assert torch.equal(node.prefill(token_ids, range(16, 32), chunk=size), whole), f"in chunks of {size}"


def test_a_norm_of_another_kind_is_left_alone():
    kernels = NativeLayers(load_module.start_kernels(choose_kernels(), ModelConfig()))
    layer_norm = torch.nn.LayerNorm(32, bias=False)
    model = torch.nn.Sequential(layer_norm, torch.nn.RMSNorm(32, eps=1e-6))
    kernels.replace_in(model)
    assert model[0] is layer_norm
    assert isinstance(model[1], modules.NativeRMSNorm)


def test_a_model_that_was_seen_to_depend_on_the_batch_says_so(tmp_path, monkeypatch):
    directory = make_tiny_model(tmp_path, architecture="gemma", dtype="bfloat16")
    monkeypatch.setattr(load_module, "depends_on_batch", lambda _model: True)
    found = [load_by_layers(directory, dtype).info.numerics for dtype in TOLD]
    assert found == [numerics(promise, choose_kernels()) for promise in TOLD.values()]
