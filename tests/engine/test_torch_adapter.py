"""Adapters of models that torch computes: right results, and rows with the bits that they have alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.low_rank import LowRank
from outrider.engine.torch_adapter import TorchAdapter
from outrider.errors import ModelError
from outrider.model_hub import load as load_module
from outrider.model_hub.adapter_files import read_adapter
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.cached_runner import CachedRunner
from tests.support.tiny_model import make_tiny_model

TOKENS = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
needs_native = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
KINDS = [
    ("gemma2", "native", "float32"),
    ("gemma2", "native", "bfloat16"),
    ("mixtral", "native", "float32"),
    ("qwen3", "torch", "float32"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def checkpoint(architecture):
        if architecture not in made:
            made[architecture] = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture)
        return made[architecture]

    return checkpoint


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[needs_native] if kind[1] == "native" else [], id="-".join(kind)) for kind in KINDS
    ],
)
def loaded(request, checkpoints):
    architecture, kernels, dtype = request.param
    directory = checkpoints(architecture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "decoder_options", lambda _config: "this test wants layers")
        config = ModelConfig(id=str(directory), dtype=dtype, kernels="auto" if kernels == "native" else "torch")
        model = load_model(config)
    assert isinstance(model.native, NativeLayers) == (kernels == "native")
    return directory, model


@pytest.fixture(scope="module")
def adapters(loaded, tmp_path_factory):
    directory, _ = loaded
    folder, attention = tmp_path_factory.mktemp("adapters"), ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = () if directory.name.startswith("mixtral") else ("gate_proj", "up_proj", "down_proj")
    return [
        make_adapter(folder / "all", directory, seed=1, rank=5, targets=(*attention, *mlp)),
        make_adapter(folder / "some", directory, seed=2, rank=3, targets=attention[1:3]),
    ]


def packed(model, directory):
    return TorchAdapter(model.model, read_adapter(directory).parts, native=model.native)


def test_logits_are_those_of_merged_weights(loaded, adapters):
    directory, model = loaded
    for adapter in adapters:
        own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            expected = merge_adapter(own, adapter)(torch.tensor([TOKENS])).logits[0]
        node = CachedRunner(model)
        rows = SequenceRows(TOKENS, 0, node.table(40), 40, adapter=packed(model, adapter))
        allowed = 1e-4 if model.spec.dtype == "float32" else 0.06
        assert (node.forward(rows) - expected).abs().max() < allowed * expected.abs().max()


def test_rows_of_several_adapters_have_the_bits_that_they_have_alone(loaded, adapters):
    _, model = loaded
    if not model.info.numerics.startswith("exact ("):
        pytest.skip("torch's own products depend on the batch")
    node = CachedRunner(model)
    of_rows = [None, *(packed(model, each) for each in adapters), None]
    tables = [node.table(40) for _ in range(2 * len(of_rows))]
    alone = [
        torch.cat([node.forward(SequenceRows(TOKENS[at : at + 1], at, table, 1, adapter=each)) for at in range(40)])
        for each, table in zip(of_rows, tables, strict=False)
    ]
    assert torch.equal(alone[0], alone[3])
    assert not any(torch.equal(alone[0], alone[each]) for each in (1, 2))
    choose, done = random.Random(0), [0] * len(of_rows)
    while left := [index for index, num in enumerate(done) if num < len(TOKENS)]:
        chosen = choose.sample(left, choose.randint(1, len(left)))
        ends = [min(done[index] + choose.choice([1, 3, 17]), len(TOKENS)) for index in chosen]
        rows = [
            SequenceRows(TOKENS[start:end], start, tables[4 + index], end - start, adapter=of_rows[index])
            for index, start, end in zip(chosen, map(done.__getitem__, chosen), ends, strict=True)
        ]
        found = node.forward(*rows).split([row.num_logits for row in rows])
        for index, end, logits in zip(chosen, ends, found, strict=True):
            assert torch.equal(logits, alone[index][done[index] : end])
            done[index] = end


def test_rows_without_an_adapter_keep_their_bits(loaded, adapters):
    """The rows have the same number and places in both batches, so that torch's own products agree, too."""
    _, model = loaded
    node, other = CachedRunner(model), CachedRunner(model)
    tables = [node.table(40) for _ in range(2)]
    rows = [SequenceRows(TOKENS[:20], 0, table, 20) for table in tables]
    expected = node.forward(*rows)
    found = other.forward(rows[0], rows[1]._replace(adapter=packed(model, adapters[0])))
    assert torch.equal(found[:20], expected[:20])
    assert not torch.equal(found[20:], expected[20:])


def test_what_does_not_fit_is_refused(loaded):
    _, model = loaded
    wrong = LowRank(np.ones((2, 7), np.float32), np.ones((7, 2), np.float32))
    for name, message in (
        ("model.layers.0.self_attn.k_proj", "maps 7 to 7 features, the model's"),
        ("model.layers.9.self_attn.k_proj", "no linear layer of the model"),
        ("model.layers.0.self_attn", "no linear layer of the model"),
        ("lm_head", "no linear layer of the model"),
        ("model.layers.0.self_attn.q_proj._joined", "no linear layer of the model"),
    ):
        with pytest.raises(ModelError, match=message):
            TorchAdapter(model.model, {name: wrong}, native=model.native)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=needs_native)])
def test_projections_that_attention_absorbs_are_refused(checkpoints, kernels):
    model = load_model(ModelConfig(id=str(checkpoints("minicpm3")), kernels=kernels))
    part = LowRank(np.ones((2, 32), np.float32), np.ones((80, 2), np.float32))
    with pytest.raises(ModelError, match=r"changes model.layers.1.self_attn.kv_b_proj, which is no linear layer"):
        TorchAdapter(model.model, {"model.layers.1.self_attn.kv_b_proj": part}, native=model.native)


def test_linear_classes_of_a_models_own_are_refused():
    """The router of this model returns a tuple."""
    config = AutoConfig.for_model("phimoe", hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    part = LowRank(np.ones((2, 64), np.float32), np.ones((model.config.num_local_experts, 2), np.float32))
    with pytest.raises(ModelError, match="no linear layer of the model"):
        TorchAdapter(model, {"model.layers.0.mlp.router": part})
