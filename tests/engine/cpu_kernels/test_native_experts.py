"""Whole layers with experts, as transformers has them: right results, and the same bits in every batch."""

from __future__ import annotations

import importlib
import weakref

import pytest
import torch
from transformers import AutoConfig

from outrider.engine import experts as experts_module
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.modules import NativeExperts, NativeLayers
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.experts import Gate, gate_of, in_whole_vectors, replace_experts

pytestmark = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")

HIDDEN, NUM_ROWS = 48, 37
GROUPS = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1}
BLOCKS = {
    "mixtral": ("MixtralSparseMoeBlock", {"num_local_experts": 5, "intermediate_size": 24}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", {"num_experts": 5, "shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": 6, "norm_topk_prob": True, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeSparseMoeBlock", {"num_experts": 5, "intermediate_size": 24, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Moe", {"n_routed_experts": 6, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3MoE", {"n_routed_experts": 9, **GROUPS}),
    "glm4_moe": ("Glm4MoeMoE", {"n_routed_experts": 9, **GROUPS}),
    "gpt_oss": ("GptOssMLP", {"num_local_experts": 5, "intermediate_size": 24, "num_experts_per_tok": 3}),
}
"""The class of a family's layer, and settings. Numbers of experts are no multiples of torch's vectors."""


class Block(torch.nn.Module):
    """A layer with experts and random weights, and a router with a few equal logits."""

    def __init__(self, family, dtype):
        super().__init__()
        name, settings = BLOCKS[family]
        config = AutoConfig.for_model(
            family, hidden_size=HIDDEN, num_attention_heads=4, moe_intermediate_size=24, **settings
        )
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        torch.manual_seed(0)
        self.mlp = getattr(module, name)(config).to(dtype).eval()
        for parameter in self.mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        router = next(each for each in self.mlp.children() if hasattr(each, "weight") and each.weight.shape[0] > 1)
        router.weight.data[1] = router.weight.data[3]  # ties, always with other experts' weights
        if hasattr(router, "bias"):
            router.bias.data[1] = router.bias.data[3]

    def forward(self, rows):
        found = self.mlp(rows.unsqueeze(0))
        return (found[0] if isinstance(found, tuple) else found).view(rows.shape)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def kernels(request):
    return CpuKernels(KernelLibrary(choose_kernels().library), request.param)


@pytest.fixture(autouse=True)
def _inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", BLOCKS)
def test_a_layer_has_transformers_results_and_a_rows_bits_alone(family, dtype, kernels):
    block = Block(family, dtype)
    rows = torch.randn((NUM_ROWS, HIDDEN), generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = block(rows)
    NativeLayers(kernels).replace_in(block)
    assert isinstance(block.mlp.experts, NativeExperts)
    found = block(rows)
    assert type(found) is torch.Tensor
    difference = (found - expected).abs().amax(-1) / expected.abs().max()
    # Rounding of bfloat16 may make a router choose another expert.
    assert float(difference.median()) < 0.02
    assert dtype is torch.bfloat16 or float(difference.max()) < 1e-5
    alone = torch.cat([block(rows[at : at + 1]) for at in range(NUM_ROWS)])
    assert torch.equal(alone, found)
    assert torch.equal(block(rows[3:20]), found[3:20])


def test_experts_of_an_unknown_form_stay_torchs(kernels):
    codes = torch.nn.Parameter(torch.zeros((5, 48, 24), dtype=torch.float8_e4m3fn), requires_grad=False)
    others = {"has_post_expert_norm": True}, {"has_gate": False}, {"act_fn": torch.nn.Tanh()}, {"down_proj": codes}
    for change in others:
        block = Block("mixtral", torch.float32)
        for name, value in change.items():
            setattr(block.mlp.experts, name, value)
        NativeLayers(kernels).replace_in(block)
        assert not isinstance(block.mlp.experts, NativeExperts)
        assert isinstance(block.mlp.gate.weight, torch.nn.Parameter)


def test_weights_of_one_layer_are_freed_before_the_next_is_packed(kernels):
    model = torch.nn.ModuleList(Block("mixtral", torch.float32) for _ in range(3))
    kept = []

    def make(module):
        assert not [each for each in kept if each() is not None]
        kept.append(weakref.ref(module.down_proj))
        return torch.nn.Identity()

    replace_experts(model, make, lambda weight, _bias: torch.nn.Identity())
    assert len(kept) == 3


def test_gates_are_recognised_by_what_they_compute():
    block = Block("gpt_oss", torch.float32).mlp.experts
    assert gate_of(block) == Gate(2, block.alpha, block.limit, shift=1.0)
    block = Block("mixtral", torch.float32).mlp.experts
    assert gate_of(block) == Gate()
    block.act_fn = torch.nn.GELU(approximate="tanh")
    assert gate_of(block) == Gate(1)
    block.act_fn = torch.nn.GELU()
    assert gate_of(block) is None


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_sigmoids_of_incomplete_vectors_would_be_noticed(family, kernels, monkeypatch):
    """Negative control, if torch's own sigmoid has two forms on this processor."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    if torch.equal(torch.stack([each.sigmoid() for each in values]), in_whole_vectors(torch.sigmoid, values)):
        pytest.skip("torch computes incomplete vectors like whole ones")
    monkeypatch.setattr(experts_module, "in_whole_vectors", lambda function, rows: function(rows))
    block = Block(family, torch.float32)
    rows = torch.randn((NUM_ROWS, HIDDEN), generator=torch.Generator().manual_seed(2))
    NativeLayers(kernels).replace_in(block)
    assert not torch.equal(torch.cat([block(rows[at : at + 1]) for at in range(NUM_ROWS)]), block(rows))
