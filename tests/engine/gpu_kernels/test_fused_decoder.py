"""A fused decoder in the interpreter gives the logits, the cache and the features of transformers' own forward."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine import graph_shapes, module_steps
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.features import FeatureReduction
from outrider.engine.gpu_kernels import why_not_fused
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows
from outrider.engine.low_rank import LowRank
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.torch_adapter import TorchAdapter
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.support.adapters import TARGETS
from tests.support.cached_runner import CachedRunner
from tests.support.interpreted_triton import interpreted_attention

fused_decoder = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.fused_decoder")
layers = pytest.importorskip("outrider.engine.gpu_kernels.layers")

BLOCK_SIZE, NUM_BLOCKS = 4, 40
TOKENS = [random.Random(5).randrange(90) for _ in range(40)]
OTHERS = [random.Random(6).randrange(90) for _ in range(40)]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama, groups of 3 heads": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama, heads of 80, no groups": ("llama", {"head_dim": 80, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 13, "head_dim": 24, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "intermediate_size": 72},
    ),
    "qwen3": ("qwen3", {"head_dim": 96, "rope_parameters": {**YARN, "rope_type": "linear"}}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def make_model(name, *, is_deterministic=False):
    """Returns (transformers' model, the same model with a fused decoder)."""
    register_attention()
    architecture, changes = MODELS[name]
    sizes = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **{**sizes, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(requires_grad=False)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "bias")):  # initially ones or zeros, which hide mistakes
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        models.append(model)
    own, model = models
    own.set_attn_implementation("eager")
    model.set_attn_implementation(ATTENTION_NAME)
    assert not why_not_fused(model.config)
    spec, options = describe_decoder(model, dtype="float32", window=resolve_window(model.config))
    fused = fused_decoder.FusedDecoder(model, spec, options, is_deterministic=is_deterministic)
    return own, RunnableModel(model=model, native=None, device="cpu", spec=spec, fused=fused)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return make_model(request.param)


@torch.inference_mode()
def reference_logits(own, token_ids):
    """Returns transformers' own logits: [num_tokens, vocab_size]."""
    return own(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


class Node(CachedRunner):
    def __init__(self, model, features=None, graphs=None):
        spec = model.spec
        if features is not None:
            spec = replace(spec, features=features.plane(spec.dtype))
        attention = interpreted_attention(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads)
        options = {"attention": attention, "graphs": graphs, "features": features}
        super().__init__(replace(model, spec=spec), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


def adapter_for(own, model, *, seed, is_deterministic=False):
    """Merges a random adapter of all layers into transformers' model, and returns it for the fused decoder."""
    generator, parts = np.random.default_rng(seed), {}
    for name, module in own.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            down = generator.standard_normal((3, module.in_features), np.float32)
            up = 0.1 * generator.standard_normal((module.out_features, 3), np.float32)
            module.weight.data += torch.from_numpy(up @ down)
            parts[name] = LowRank(down, up)
    return TorchAdapter(model.model, parts, is_deterministic=is_deterministic)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_rows_with_an_adapter_beside_rows_without(name):
    own, model = make_model(name)
    expected = reference_logits(own, OTHERS)
    adapter = adapter_for(own, model, seed=1)
    merged = reference_logits(own, TOKENS)
    assert (merged - expected[: len(TOKENS)]).abs().max() > 0.01
    node = Node(model)
    first, second = node.table(40), node.table(40)
    rows = SequenceRows(TOKENS[:30], 0, first, 30, adapter=adapter)
    found = node.forward(SequenceRows(OTHERS[:9], 0, second, 1), rows)
    close(found, torch.cat([expected[8:9], merged[:30]]))


def test_deterministic_rows_of_adapters_have_the_bits_that_they_have_alone():
    own, model = make_model("qwen3", is_deterministic=True)
    adapters = [adapter_for(own, model, seed=seed, is_deterministic=True) for seed in range(2)]
    node = Node(model)
    rows = [SequenceRows(TOKENS[:5], 0, node.table(40), 5, adapter=adapter) for adapter in (None, *adapters)]
    alone = torch.cat([node.forward(each) for each in rows])
    assert torch.equal(node.forward(*rows), alone)
    assert not torch.equal(alone[:5], alone[5:10])


def test_ragged_steps_give_transformers_logits(model):
    """Two sequences in the same steps: chunks of prompts with and without logits, and decoding."""
    own, model = model
    node = Node(model)
    expected, others = reference_logits(own, TOKENS), reference_logits(own, OTHERS)
    first, second = node.table(40), node.table(40)
    done = []
    none = node.forward(SequenceRows(TOKENS[:11], 0, first, 0), on_layer_done=done.append)
    assert (none.shape, done) == ((0, 96), [0, 1])
    found = node.forward(SequenceRows(OTHERS[:9], 0, second, 1), SequenceRows(TOKENS[11:30], 11, first, 19))
    close(found, torch.cat([others[8:9], expected[11:30]]))
    for at in range(30, 33):
        rows = (
            SequenceRows(TOKENS[at : at + 1], at, first, 1),
            SequenceRows(OTHERS[at - 21 : at - 20], at - 21, second, 1),
        )
        close(node.forward(*rows), torch.stack([expected[at], others[at - 21]]))


def test_rows_of_a_draft_tree_see_their_own_paths(model):
    own, model = model
    node = Node(model)
    table = node.table(40)
    node.forward(SequenceRows(TOKENS[:20], 0, table, 0))
    tree = [TOKENS[20], OTHERS[0], TOKENS[21], OTHERS[1], TOKENS[22]]
    found = node.forward(SequenceRows(tree, 20, table, 5, (-1, -1, 1, 1)))
    on_path, beside = reference_logits(own, TOKENS[:23]), reference_logits(own, [*TOKENS[:22], OTHERS[1]])
    sibling = reference_logits(own, [*TOKENS[:21], OTHERS[0]])
    close(found, torch.stack([on_path[20], sibling[21], on_path[21], beside[22], on_path[22]]))


def test_a_model_is_in_memory_once_and_its_modules_go_on(model):
    """The modules share the fused decoder's weights. A node uses the modules if the two do not agree."""
    own, model = model
    weights = list(model.model.parameters())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in weights}
    assert sum(storages.values()) == sum(each.nbytes for each in weights)
    joined = model.model.base_model.layers[1].self_attn
    assert len({getattr(joined, f"{name}_proj").weight.untyped_storage().data_ptr() for name in "qkv"}) == 1
    node = Node(replace(model, fused=None))
    close(node.forward(SequenceRows(TOKENS[:20], 0, node.table(40), 20)), reference_logits(own, TOKENS[:20]))


@pytest.mark.parametrize("takes_final_norm", [False, True])
def test_features_are_of_transformers_hidden_states(model, takes_final_norm):
    own, model = model
    reduction = FeatureReduction(taps=(2, 0, 1), hidden_size=48, takes_final_norm=takes_final_norm)
    node = Node(model, reduction)
    table = node.table(40)
    node.forward(SequenceRows(TOKENS[:7], 0, table, 0))
    node.forward(SequenceRows(TOKENS[7:16], 7, table, 1), SequenceRows(OTHERS[:3], 0, node.table(40), 3))
    behind = []
    with torch.inference_mode(), own.model.norm.register_forward_pre_hook(lambda module, args: behind.append(args[0])):
        states = own(input_ids=torch.tensor([TOKENS[:16]]), output_hidden_states=True, use_cache=False).hidden_states
    last = states[2] if takes_final_norm else behind[0]
    close(
        node.features(reduction.plane_name, table, range(16)), torch.cat([last[0], states[0][0], states[1][0]], dim=-1)
    )


def test_captured_steps_are_the_same(monkeypatch):
    """Logits and features of padded batches are correct, although all batches share one buffer."""
    replayed = []

    def capture(run):
        run()
        return lambda: (replayed.append(1), run())

    monkeypatch.setattr(module_steps, "cuda_graphs", lambda _device: capture)
    own, model = make_model("qwen3")
    reduction = FeatureReduction(taps=(1,), hidden_size=48)
    node = Node(model, reduction, GraphShapes(4))
    node.runner.capture_graphs()
    first, second = node.table(40), node.table(40)
    close(node.forward(SequenceRows(TOKENS[:3], 0, first, 3)), reference_logits(own, TOKENS[:3]))
    found = node.forward(SequenceRows(OTHERS[:1], 0, second, 1), SequenceRows(TOKENS[3:5], 3, first, 2))
    close(found, torch.cat([reference_logits(own, OTHERS[:1]), reference_logits(own, TOKENS[:5])[3:]]))
    assert len(replayed) == 2
    with torch.inference_mode():
        states = own(input_ids=torch.tensor([TOKENS[:5]]), output_hidden_states=True, use_cache=False).hidden_states
    close(node.features(reduction.plane_name, first, range(5)), states[1][0])


def test_captured_prompts_are_the_same(monkeypatch):
    """Their keys and values are in the cache when the first layer is reported. Logits are computed without a graph."""
    replayed, reported = [], []

    def capture(run):
        run()
        return lambda: (replayed.append(1), run())

    monkeypatch.setattr(module_steps, "cuda_graphs", lambda _device: capture)
    monkeypatch.setattr(graph_shapes, "MIN_PROMPT_ROWS", 4)
    own, model = make_model("qwen2")
    node = Node(model, graphs=GraphShapes(8, has_logits=False))
    node.runner.capture_graphs()
    first, second = node.table(40), node.table(40)
    chunks = [SequenceRows(TOKENS[:5], 0, first, 0), SequenceRows(OTHERS[:2], 0, second, 0)]
    assert node.forward(*chunks, on_layer_done=lambda layer: reported.append((layer, len(replayed)))).shape[0] == 0
    assert reported == [(layer, 1) for layer in range(model.spec.num_layers)]
    assert node.forward(SequenceRows(OTHERS[2:3], 2, second, 0)).shape[0] == 0
    found = node.forward(SequenceRows(TOKENS[5:6], 5, first, 1), SequenceRows(OTHERS[3:4], 3, second, 1))
    close(found, torch.stack([reference_logits(own, TOKENS[:6])[-1], reference_logits(own, OTHERS[:4])[-1]]))
    assert len(replayed) == 2


def test_rows_that_pad_have_angles_however_small_the_window_is(monkeypatch):
    """Padding rows have ascending positions, so the kernel would read beyond the end of a short table of angles."""
    monkeypatch.setattr(module_steps, "cuda_graphs", lambda _device: lambda run: run)
    beyond = []

    def checked(projected, *arguments, cosines, positions, **options):
        beyond.append(int(positions.max()) - len(cosines))
        return rotate_and_store(projected, *arguments, cosines=cosines, positions=positions, **options)

    rotate_and_store = fused_decoder.rotate_and_store
    monkeypatch.setattr(fused_decoder, "rotate_and_store", checked)
    node = Node(make_model("qwen2")[1], graphs=GraphShapes(128))  # the window is 64 tokens
    node.runner.capture_graphs()
    node.forward(*(SequenceRows([1], 0, node.table(1), 1) for _ in range(33)))
    assert beyond
    assert max(beyond) < 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3"])
def test_a_row_has_the_same_bits_alone_and_in_company(name, monkeypatch):
    tile = layers.ProductTile(rows=16, outputs=32, features=16, split_features=32)
    monkeypatch.setattr(layers, "PRODUCT_TILE", tile)
    monkeypatch.setattr(layers, "_MAX_SPLIT_ROWS", 3)
    torch.set_num_threads(1)
    own, model = make_model(name, is_deterministic=True)
    node = Node(model)
    table = node.table(40)
    whole = node.forward(SequenceRows(TOKENS[:6], 0, node.table(40), 6))
    close(whole, reference_logits(own, TOKENS[:6]))
    alone = [node.forward(SequenceRows([token], at, table, 1)) for at, token in enumerate(TOKENS[:4])]
    assert torch.equal(torch.cat(alone), whole[:4])
    company = node.forward(SequenceRows(OTHERS[:2], 0, node.table(40), 2), SequenceRows(TOKENS[4:6], 4, table, 2))
    assert torch.equal(company[2:], whole[4:])
