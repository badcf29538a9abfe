"""Experts divided among ranks, which are threads here: the bits of one rank, whoever has which rows and experts."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from outrider.engine import divided_experts
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.modules import NativeExperts, NativeLayers
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.divided_experts import ExpertDivision
from outrider.engine.experts import gate_of
from tests.support.thread_ranks import ThreadRanks

HIDDEN, NUM_EXPERTS, NUM_ROWS, NUM_SLOTS = 48, 7, 23, 3
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_local_experts": NUM_EXPERTS, "num_attention_heads": 4}
NATIVE = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")


def experts(kind, dtype):
    """Returns transformers' experts with random weights."""
    config = AutoConfig.for_model({MixtralExperts: "mixtral", GptOssExperts: "gpt_oss"}[kind], **SIZES)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = kind(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.requires_grad_(requires_grad=False)


def native(quantise):
    """Returns a function that makes native experts, with kernels of their own."""

    def make(module):
        owner = NativeLayers(CpuKernels(KernelLibrary(choose_kernels().library), 1), quantise=quantise)
        return NativeExperts(owner, module, gate_of(module))

    return make


def routed(dtype):
    """Returns rows, expert ids and weights. Most rows choose experts 0 and 1; some slots have no expert."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((NUM_ROWS, HIDDEN), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_SLOTS] for _ in range(NUM_ROWS)])
    ids[:18, 0], ids[:18, 1], ids[:18, 2] = 1, 0, 5
    ids[3, 1], ids[20, 0] = NUM_EXPERTS, -1
    return rows, ids, torch.rand((NUM_ROWS, NUM_SLOTS), generator=generator)


def check(monkeypatch, module, make, num_ranks):
    dtype = module.down_proj.dtype
    inputs = routed(dtype)
    with torch.inference_mode():
        expected = make(copy.deepcopy(module))(*inputs)
    ranks = ThreadRanks(num_ranks)
    monkeypatch.setattr(divided_experts, "dist", ranks)
    layers = ranks.run(lambda rank: ExpertDivision(rank, num_ranks, num_spares=1).divided(make)(copy.deepcopy(module)))
    parts = [slice(at, at + 12) for at in range(0, 12 * num_ranks, 12)]  # with three ranks, the last one has no rows

    def compute(rank):
        return layers[rank](*(each[parts[rank]] for each in inputs))

    assert torch.equal(torch.cat(ranks.run(compute)), expected)
    copies = ranks.run(lambda rank: (layers[rank].renew_copies(), layers[rank].copies)[1])
    assert copies[0]
    assert copies == [copies[0]] * num_ranks
    assert torch.equal(torch.cat(ranks.run(compute)), expected)
    used = layers[0]._where[1, 0] != layers[0]._where[0, 0]
    assert used.nonzero().flatten().tolist() == sorted(copies[0])
    assert layers[0].balance >= 1.0


@NATIVE
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "dtype", "quantise"),
    [
        (MixtralExperts, torch.bfloat16, ""),
        (GptOssExperts, torch.float32, ""),  # with biases
        (MixtralExperts, torch.bfloat16, "int8"),
    ],
)
def test_native_experts_have_the_bits_of_one_rank(monkeypatch, kind, dtype, quantise, num_ranks):
    check(monkeypatch, experts(kind, dtype), native(quantise), num_ranks)
