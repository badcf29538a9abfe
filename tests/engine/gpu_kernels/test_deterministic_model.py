"""A model of our layers, in the interpreter: a row's logits have the same bits alone and with other rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.support.interpreted_triton import interpreted_attention

layers = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.gpu_kernels.layers")

BLOCK_SIZE = 8
FAMILIES = {"qwen2": {}, "mixtral": {"num_local_experts": 4}}
TOKENS = [(i * 37) % 90 for i in range(40)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes tiles so small that small models have splits, and batches on both sides of the row limit for splitting."""
    tile = layers.ProductTile(rows=16, outputs=32, features=16, split_features=32)
    monkeypatch.setattr(layers, "PRODUCT_TILE", tile)
    monkeypatch.setattr(layers, "_MAX_SPLIT_ROWS", 3)


def test_a_product_is_a_product_with_the_same_bits_in_any_batch(small_tiles):
    generator = torch.Generator().manual_seed(1)
    rows, weight = torch.randn((20, 72), generator=generator), torch.randn((50, 72), generator=generator)
    bias = torch.randn(50, generator=generator)
    product = layers.linear(rows, weight, bias)
    torch.testing.assert_close(product, rows @ weight.T + bias, rtol=1e-5, atol=1e-5)
    for part in (slice(0, 1), slice(4, 6), slice(15, 19)):
        assert torch.equal(layers.linear(rows[part].contiguous(), weight, bias), product[part])
    assert layers.linear(rows[:0], weight, None).shape == (0, 50)


def test_other_splits_would_be_noticed(small_tiles, monkeypatch):
    """Negative control: if products are split elsewhere, some bits differ."""
    rows, weight = torch.randn((4, 72)), torch.randn((50, 72))
    product = layers.linear(rows, weight, None)
    monkeypatch.setattr(layers, "PRODUCT_TILE", layers.ProductTile(rows=16, outputs=32, features=16, split_features=64))
    assert 0.0 < float((layers.linear(rows, weight, None) - product).abs().max()) < 1e-4


@pytest.fixture(params=FAMILIES)
def runner(request, small_tiles):
    from outrider.engine.deterministic_layers import (
        DeterministicExperts,
        DeterministicLinear,
        DeterministicRMSNorm,
        make_deterministic,
    )

    torch.set_num_threads(1)
    register_attention()
    # Widths are multiples of 64, because torch on a CPU computes a remainder with other code.
    config = AutoConfig.for_model(
        request.param, vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2, **FAMILIES[request.param],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    spec, _ = describe_decoder(model, dtype="float32", window=resolve_window(model.config))
    plain = reference_logits(model)
    make_deterministic(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(DeterministicRMSNorm) == 2 + 1
    assert not any(issubclass(kind, torch.nn.Linear) for kind in kinds)
    assert DeterministicLinear in kinds
    assert (DeterministicExperts in kinds) == (request.param == "mixtral")
    cache = PagedKVCache(spec.planes, layer_groups=spec.layer_groups, num_blocks=12, block_size=BLOCK_SIZE)
    loaded = SimpleNamespace(
        model=model, device="cpu", spec=spec, native=None, fused=None, cpu_kernels=None, stage=None
    )
    return make_runner(loaded, cache, interpreted_attention(num_heads=2, num_kv_heads=1)), plain


@torch.inference_mode()
def reference_logits(model):
    """Returns transformers' logits of 6 tokens: [6, 96]."""
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([TOKENS[:6]]), use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    return logits


def logits_of(runner, *rows):
    return runner.forward(build_input_batch(rows, BLOCK_SIZE)).clone()


def test_a_models_rows_have_the_same_bits_alone_and_in_company(runner):
    runner, plain = runner
    whole = logits_of(runner, SequenceRows(TOKENS[:6], 0, (3,), 6))
    torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-4)
    alone = [logits_of(runner, SequenceRows([token], at, (5,), 1)) for at, token in enumerate(TOKENS[:4])]
    assert torch.equal(torch.cat(alone), whole[:4])
    verified = logits_of(runner, SequenceRows(TOKENS[20:22], 0, (9,), 2), SequenceRows(TOKENS[4:6], 4, (5,), 2))
    assert torch.equal(verified[2:], whole[4:])
