"""Our kernels for mixtures of experts: transformers' sums, and the same bits of a row in any batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytest.importorskip("triton")
layers = pytest.importorskip("outrider.engine.gpu_kernels.layers")
kernels = pytest.importorskip("outrider.engine.gpu_kernels.experts")
DeterministicExperts = pytest.importorskip("outrider.engine.deterministic_layers").DeterministicExperts

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_ROWS, NUM_SLOTS = 40, 64, 5, 21, 2
HAS_CUDA = torch.cuda.is_available()
NO_GPU = pytest.mark.skipif(HAS_CUDA, reason="runs on the GPU")
KINDS = [  # triton's interpreter cannot multiply in bfloat16
    pytest.param(("cpu", torch.float32), marks=NO_GPU, id="interpreted-float32"),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu, id="cuda-float32"),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="cuda-bfloat16"),
]
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE}
EXPERTS = {
    "gates and ups": lambda: Qwen3MoeExperts(config("qwen3_moe", num_experts=NUM_EXPERTS)),
    "transposed, alternating, with biases": lambda: GptOssExperts(config("gpt_oss", num_local_experts=NUM_EXPERTS)),
    "without gates": lambda: NemotronHExperts(config("nemotron_h", n_routed_experts=NUM_EXPERTS)),
}


def config(model_type, **settings):
    made = AutoConfig.for_model(model_type, **SIZES, num_attention_heads=4, **settings)
    made._experts_implementation = "eager"
    return made


@pytest.fixture
def _interpreted():
    """Replaces the fixture that skips tests on a GPU: these run on a GPU if there is one."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Makes tiles so small that experts have several, and products several blocks of features."""
    monkeypatch.setattr(kernels, "PRODUCT_TILE", layers.ProductTile(rows=16, outputs=32, features=16))
    monkeypatch.setattr(kernels, "SLOTS_BLOCK", 32)
    with torch.inference_mode():
        yield


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def made(name, kind):
    """Returns transformers' experts, and rows with experts: (rows, ids, weights). One expert gets most of the rows."""
    device, dtype = kind
    torch.manual_seed(0)
    experts = EXPERTS[name]()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.stack([1 + torch.randperm(NUM_EXPERTS - 2)[:NUM_SLOTS] for _ in range(NUM_ROWS)])  # not 0 and the last
    ids[:18, 0], ids[:18, 1] = 2, 1
    rows, weights = torch.randn((NUM_ROWS, HIDDEN)), torch.rand((NUM_ROWS, NUM_SLOTS))
    return experts.to(device, dtype), (rows.to(device, dtype), ids.to(device), weights.to(device))


@pytest.mark.parametrize("name", EXPERTS)
def test_sums_are_transformers_with_the_same_bits_in_any_batch(name, kind):
    experts, inputs = made(name, kind)
    ours = DeterministicExperts(experts)
    found = ours(*inputs)
    allowed = 1e-5 if found.dtype == torch.float32 else 2e-2
    assert float((found - experts(*inputs)).abs().max()) < allowed * float(found.abs().max())
    for part in (slice(0, 1), slice(17, 20), slice(3, NUM_ROWS)):
        assert torch.equal(ours(*(each[part] for each in inputs)), found[part])
    order = torch.arange(NUM_ROWS - 1, -1, -1, device=found.device)
    assert torch.equal(ours(*(each[order] for each in inputs)), found[order])
    assert ours(*(each[:0] for each in inputs)).shape == (0, HIDDEN)


def test_slots_are_sorted_by_expert_and_those_without_one_add_nothing(kind):
    device, _ = kind
    ids = torch.tensor([[2, 7], [0, 2], [-1, 2]], device=device)
    slots = kernels.sort_slots(ids, 4)
    assert slots.order.tolist() == [4, 2, 0, 3, 5, 1]
    assert slots.starts.tolist() == [1, 2, 2, 5, 5]
    assert slots.tile_starts.tolist() == [0, 1, 1, 2, 2]
    experts, (rows, ids, weights) = made("gates and ups", kind)
    ours = DeterministicExperts(experts)
    found = ours(rows, ids, weights)
    more = torch.tensor([NUM_EXPERTS, -1, 99], device=device).repeat(NUM_ROWS, 1)
    unweighted = torch.full((NUM_ROWS, 3), torch.nan, device=device)
    assert torch.equal(ours(rows, torch.cat((more, ids), 1), torch.cat((unweighted, weights), 1)), found)
    assert not ours(rows, more, unweighted).any()


def test_no_choice_of_experts_needs_more_programs_than_there_are():
    """The grid's size depends on the number of slots only, as in a CUDA graph."""
    generator = torch.Generator().manual_seed(0)
    for num_slots in (1, 3, 15, 16, 17, 64, 200):
        for num_chosen in range(1, NUM_EXPERTS + 1):
            ids = torch.randint(0, num_chosen, (num_slots, 1), generator=generator)
            num_tiles = int(kernels.sort_slots(ids, NUM_EXPERTS).tile_starts[-1])
            assert -(-num_slots // 16) <= num_tiles <= kernels.max_tiles(num_slots, NUM_EXPERTS)
    worst = torch.tensor([0, 1, 2, 3, *[4] * 61]).unsqueeze(1)  # each of four experts has a tile with one slot
    assert kernels.sort_slots(worst, 5).tile_starts[-1] == kernels.max_tiles(65, 5) == 8


def test_another_order_of_features_would_be_noticed(kind, monkeypatch):
    """Negative control: with other blocks of features, some bits differ."""
    experts, inputs = made("gates and ups", kind)
    found = DeterministicExperts(experts)(*inputs)
    monkeypatch.setattr(kernels, "PRODUCT_TILE", layers.ProductTile(rows=16, outputs=32, features=64))
    if found.dtype == torch.float32:
        assert 0.0 < float((DeterministicExperts(experts)(*inputs) - found).abs().max()) < 1e-4


@pytest.mark.gpu
def test_a_graph_of_one_choice_of_experts_computes_another():
    experts, inputs = made("gates and ups", ("cuda", torch.bfloat16))
    ours = DeterministicExperts(experts)
    fixed = [each.clone() for each in inputs]
    fixed[1].fill_(3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(*fixed)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = ours(*fixed)
    for kept, other in zip(fixed, inputs, strict=True):
        kept.copy_(other)
    graph.replay()
    assert torch.equal(found, ours(*inputs))


@pytest.mark.parametrize("name", EXPERTS)
def test_products_of_single_slots_add_up_to_the_sums(name, kind):
    """As in ranks that divide experts: others make the products, and torch adds them."""
    experts, (rows, ids, weights) = made(name, kind)
    ours, total = DeterministicExperts(experts), torch.zeros((NUM_ROWS, HIDDEN), device=rows.device)
    for slot in range(NUM_SLOTS):
        total = total + ours.products(rows, ids[:, slot].contiguous()) * weights[:, slot, None]
    assert torch.equal(total.to(rows.dtype), ours(rows, ids, weights))
    memory = ours.memory_of(2)
    assert {each.data_ptr() for each in memory} == {each[2].data_ptr() for each in experts.parameters()}
