"""Layers with linear attention: transformers' results, and bits that depend on nothing but the tokens before a row."""

from __future__ import annotations

import importlib
import time

import pytest
import torch
from transformers import AutoConfig

from outrider.engine.attention.native import NativeAttention
from outrider.engine.attention.transformers_hook import STEP_ARGUMENT
from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import StatePool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import STATE_PLANE, LayerGroup, PlaneSpec
from outrider.engine.kv_cache.state_table import StateTable
from outrider.engine.linear_attention import describe_linear
from outrider.engine.module_steps import PagedStep
from tests.families.families import HYBRID

HIDDEN, NUM_TOKENS, BLOCK = 48, 75, 8
MODULES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
}
SIZES = {
    "usual": {},
    "odd": {"linear_key_head_dim": 48, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3},
    "wide": {"linear_key_head_dim": 32, "linear_value_head_dim": 80, "linear_num_key_heads": 4},
}


class Layer(torch.nn.Module):
    """A model that consists of one layer, transformers' with random weights."""

    def __init__(self, family, dtype, sizes):
        super().__init__()
        config = AutoConfig.for_model(family, hidden_size=HIDDEN, num_hidden_layers=3, **{**HYBRID, **sizes})
        folder = family.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        torch.manual_seed(0)
        self.linear_attn = getattr(module, MODULES[family])(config, 0).to(dtype).eval()
        for name, parameter in self.linear_attn.named_parameters():
            if not name.endswith("A_log"):
                torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.3)


class Runner:
    """The layer over a cache."""

    def __init__(self, layer, dtype, kernels):
        linear = describe_linear(layer)
        assert linear is not None
        NativeLayers(kernels).replace_in(layer)
        self.layer, self.kernels, self.next_block = layer.linear_attn, kernels, 0
        name = str(dtype).removeprefix("torch.")
        other = [PlaneSpec(side, 1, 1, 16, name) for side in "kv"]
        self.cache = PagedKVCache(
            [*other, *linear.planes(name)],
            num_blocks=64,
            block_size=BLOCK,
            kernels=kernels,
            layer_groups=[LayerGroup((1,)), linear.group],
            state_slots=32,
        )
        self.pool = StatePool(num_blocks=32, block_size=BLOCK, hash_seed=b"")

    def blocks(self):
        """Returns the blocks of a new sequence, in falling order."""
        self.next_block += -(-NUM_TOKENS // BLOCK)
        return list(range(self.next_block - 1, self.next_block - 1 - -(-NUM_TOKENS // BLOCK), -1))

    def forward(self, *parts):
        """Returns the outputs of each part, which is (SequenceRows, hidden states of its rows)."""
        batch = build_input_batch([rows for rows, _ in parts], BLOCK)
        step = PagedStep(self.cache, NativeAttention(self.kernels), batch)
        hidden = torch.cat([states for _, states in parts])
        output = self.layer(hidden.unsqueeze(0), **{STEP_ARGUMENT: step})[0]
        return output.split([len(states) for _, states in parts])


def rows_of(start, end, blocks, states=None, parents=()):
    return SequenceRows([0] * (end - start), start, blocks, 0, parents, states=states)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def hidden():
    return torch.randn((2, NUM_TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", MODULES)
def test_a_layer_has_transformers_results(family, sizes, dtype, hidden, library, teams):
    layer = Layer(family, dtype, SIZES[sizes])
    expected = layer.linear_attn(hidden[:1].to(dtype))[0].float()
    runner = Runner(layer, dtype, teams(library, 1))
    found = runner.forward((rows_of(0, NUM_TOKENS, runner.blocks()), hidden[0].to(dtype)))[0].float()
    allowed = 1e-4 if dtype == torch.float32 else 0.06
    assert float((found - expected).abs().max()) < allowed * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_depend_on_the_tokens_before_a_row_only(sizes, dtype, hidden, library, teams):
    hidden = hidden.to(dtype)
    runner = Runner(Layer("qwen3_next", dtype, SIZES[sizes]), dtype, teams(library, 1))
    (expected,) = runner.forward((rows_of(0, NUM_TOKENS, runner.blocks()), hidden[0]))
    for chunk in (1, 7, 16, 40):
        blocks, states = runner.blocks(), StateTable(runner.pool)
        for start in range(0, NUM_TOKENS, chunk):
            end = min(start + chunk, NUM_TOKENS)
            states.reserve(start, end)
            steps = states.plan(start, end)
            assert start - steps.position <= 16
            (found,) = runner.forward((rows_of(start, end, blocks, steps), hidden[0, start:end]))
            assert torch.equal(found, expected[start:end])
        states.free()
        runner.next_block = -(-NUM_TOKENS // BLOCK)


def test_a_team_and_company_change_no_bits(hidden, library, teams):
    runners = [Runner(Layer("qwen3_5_text", torch.bfloat16, {}), torch.bfloat16, teams(library, num)) for num in (1, 2)]
    hidden = hidden.bfloat16()
    (alone,) = runners[0].forward((rows_of(0, NUM_TOKENS, runners[0].blocks()), hidden[0]))
    of_other, together = runners[1].forward(
        (rows_of(0, 20, runners[1].blocks()), hidden[1, :20]), (rows_of(0, NUM_TOKENS, runners[1].blocks()), hidden[0])
    )
    assert torch.equal(together, alone)
    assert not torch.equal(of_other, alone[:20])


def test_a_row_that_extends_the_path_before_it_costs_one_token(hidden, library, teams):
    """Trees list their rows depth first."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    runner = Runner(Layer("qwen3_next", torch.bfloat16, sizes), torch.bfloat16, teams(library, 1))
    hidden, blocks = hidden[0].bfloat16(), runner.blocks()

    def seconds_of(*parents):
        times = []
        for _ in range(5):
            started = time.thread_time()
            runner.forward((rows_of(0, 52, blocks, None, parents), hidden[:52]))
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds_of(*range(-1, 49), -1) < 4 * seconds_of()


def test_rows_in_trees_see_their_path_and_change_no_state(hidden, library, teams):
    """Drafts 0 and 1 follow the known token; 2 follows 0, 3 follows 1, and 4 and 5 follow 3."""
    runner, hidden = (
        Runner(Layer("olmo_hybrid", torch.bfloat16, {}), torch.bfloat16, teams(library, 1)),
        hidden.bfloat16(),
    )
    parents, (text, drafts) = (-1, -1, 0, 1, 3, 3), hidden
    blocks, states = runner.blocks(), StateTable(runner.pool)
    states.reserve(0, 30)
    runner.forward((rows_of(0, 30, blocks, states.plan(0, 30)), text[:30]))
    states.reserve(30, 33)
    steps = states.plan(30, 33)
    assert [position for position, _ in steps.stores] == [32]
    rows = torch.cat([text[30:33], drafts[: len(parents)]])
    (found,) = runner.forward((rows_of(30, 33 + len(parents), blocks, steps, parents), rows))
    stored = runner.cache.layers(STATE_PLANE)[0, steps.stores[0][1]].copy()
    for draft in range(len(parents)):
        path = [draft]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = torch.cat([text[:33], drafts[path]])
        (expected,) = runner.forward((rows_of(0, len(chain), runner.blocks()), chain))
        assert torch.equal(found[3 + draft], expected[-1])
        assert torch.equal(found[:3], expected[30:33])
        runner.next_block = -(-NUM_TOKENS // BLOCK)
    other = StateTable(runner.pool)
    other.reserve(0, 33)
    plan = other.plan(0, 33)
    runner.forward((rows_of(0, 33, runner.blocks(), plan), text[:33]))
    assert (runner.cache.layers(STATE_PLANE)[0, plan.stores[0][1]] == stored).all()
