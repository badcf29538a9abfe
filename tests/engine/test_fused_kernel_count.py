"""How many kernels a fused decoder launches for models of real sizes, and that it never waits, in FakeTensorMode.

Every kernel costs a launch and reads and writes memory. The fewer there are, the closer a step comes to the time that
reading the weights takes.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.engine.model_spec import ModelSpec
from outrider.engine.runnable_model import RunnableModel
from tests.support.fake_gpu import GPU, OneDevice, are_aligned, devices_of, fake_gpu

pytestmark = pytest.mark.triton

KERNELS = {
    "outrider.engine.attention.triton_paged": ("attend", "merge_splits"),
    "outrider.engine.gpu_kernels.decoder": ("normalise", "rotate", "multiply_gates"),
    "outrider.engine.gpu_kernels.layers": ("multiply", "merge_products"),
}
VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "flatten", "lift_fresh", "narrow",
    "new_empty", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view",
}  # fmt: skip
"""Operations that launch no kernel."""
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
PROGRAMS_OF_AN_H100 = 264
STEP_OF_FEW_ROWS = [SequenceRows([5], 600, range(38), num_logits=1) for _ in range(8)]
CHUNK = [SequenceRows([0] * 4096, 0, range(256), num_logits=1)]


class Launches(TorchDispatchMode):
    """A counter of the launches of torch's kernels and ours, by name."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.by_name = Counter()
        for module, names in KERNELS.items():
            for name in names:
                monkeypatch.setattr(f"{module}.{name}", FakeKernel(name, self.by_name))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS and "cuda" in devices_of((args, kwargs)):  # the batch's copy to the GPU does not count
            self.by_name[name] += 1
        return result


class FakeKernel:
    def __init__(self, name, launches):
        self._name, self._launches = name, launches

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)

        def launch(*arguments, **constants):
            assert devices_of((arguments, constants)) == {"cuda"}
            assert are_aligned(arguments)
            self._launches[self._name] += 1

        return launch


@pytest.fixture
def launches(monkeypatch):
    pytest.importorskip("triton")
    register_attention()
    for name in ("uniform_", "normal_"):  # fake weights have no values, and these functions would need a real device
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_arguments, **_keywords: tensor)
    launches = Launches(monkeypatch)
    with fake_gpu(monkeypatch):
        yield launches


def runner_of(architecture, num_layers, *, is_deterministic=False, features=None, **changes):
    from outrider.engine.fused_decoder import FusedDecoder

    sizes = LLAMA_8B | {"num_hidden_layers": num_layers} | changes
    config = AutoConfig.for_model(architecture, **sizes)
    with GPU:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
        model.eval().requires_grad_(requires_grad=False)
        spec = ModelSpec(
            architecture=architecture, num_layers=num_layers, num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, vocab_size=config.vocab_size,
            max_model_len=8192, dtype="bfloat16", features=None if features is None else features.plane("bfloat16"),
        )  # fmt: skip
        options = [AttentionOptions(config.head_dim**-0.5)] * num_layers
        fused = FusedDecoder(model, spec, options, is_deterministic=is_deterministic)
    loaded = RunnableModel(model=model, native=None, device=str(GPU), spec=spec, fused=fused)
    cache = PagedKVCache(spec.planes, layer_groups=spec.layer_groups, num_blocks=64, block_size=16, device=str(GPU))
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
    from outrider.engine.attention.triton_paged import TritonAttention  # imports triton

    attention = TritonAttention(GPU, num_programs=PROGRAMS_OF_AN_H100, **heads)
    return make_runner(loaded, cache, attention, features=features)


def count(launches, runner, rows):
    """Counts the launches of one forward pass, by name."""
    launches.by_name.clear()
    with OneDevice(), launches:
        logits = runner.forward(build_input_batch(rows, 16))
    assert logits.shape[0] == sum(row.num_logits for row in rows)
    return Counter(launches.by_name)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize(("rows", "num_attention_kernels"), [(STEP_OF_FEW_ROWS, 2), (CHUNK, 1)])
def test_a_layer_is_nine_kernels_and_one_more_where_attention_is_split(
    launches, architecture, rows, num_attention_kernels
):
    few, more = (count(launches, runner_of(architecture, num_layers), rows) for num_layers in (1, 2))
    of_layer = more - few
    assert of_layer.total() == 8 + num_attention_kernels
    assert of_layer["normalise"] == 2
    assert of_layer["linear"] == 4
    # Outside of layers: embedding, first norm, choice of rows, output layer and conversion to float32. Gemma also
    # scales embeddings by a tensor.
    assert (few - of_layer).total() <= (7 if architecture == "gemma3_text" else 5)


def test_deterministic_products_add_the_merges_of_their_splits(launches):
    few, more = (count(launches, runner_of("llama", number, is_deterministic=True), CHUNK) for number in (1, 2))
    assert (more - few) == {"multiply": 4, "normalise": 2, "rotate": 1, "multiply_gates": 1, "attend": 1}
    few, more = (
        count(launches, runner_of("llama", number, is_deterministic=True), STEP_OF_FEW_ROWS) for number in (1, 2)
    )
    assert (more - few)["merge_products"] == 4


def test_features_are_one_concatenation_product_and_store(launches):
    with unset_fake_temporarily():  # a real tensor, since its values are hashed
        projection = torch.zeros(64, 3 * 4096)
        reduction = FeatureReduction(taps=(0, 1, 2), hidden_size=4096, takes_final_norm=True, projection=projection)
    plain = count(launches, runner_of("llama", 2), STEP_OF_FEW_ROWS)
    with_features = count(launches, runner_of("llama", 2, features=reduction), STEP_OF_FEW_ROWS)
    assert (with_features - plain) == {"cat": 1, "linear": 1, "index_copy_": 1}


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "hidden_size"), [(9, 3, 576), (14, 2, 896), (5, 1, 320)])
@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_no_number_of_rows_or_heads_leaves_an_argument_unaligned(
    launches, num_heads, num_kv_heads, hidden_size, num_rows
):
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": 64}
    runner = runner_of("llama", 1, hidden_size=hidden_size, is_deterministic=True, **sizes)
    counted = count(launches, runner, STEP_OF_FEW_ROWS[:num_rows])
    assert (counted["attend"], counted["merge_splits"]) == (1, 1)


def test_an_unaligned_argument_would_be_noticed(launches):
    values = torch.empty((2, 9), device=GPU)
    assert are_aligned([values])
    assert not are_aligned(values.unbind(0))
