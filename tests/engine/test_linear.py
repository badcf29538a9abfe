from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from outrider.engine.linear import SharedProjection, replace_linear_layers, replace_norms


class Linear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = weight.clone(), None if bias is None else bias.detach().clone()

    def forward(self, rows):
        return nn.functional.linear(rows, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 24, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)
        self.o_proj = nn.Linear(24, 24, bias=bias)

    def forward(self, rows):
        return self.o_proj(self.q_proj(rows) * torch.cat([self.k_proj(rows), self.v_proj(rows)] * 2, -1)[..., :24])


def attention(*, bias=False):
    torch.manual_seed(0)
    return Attention(bias=bias).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (1, 7, 24), (0, 24)])
def test_replaced_layers_compute_the_same(bias, shape):
    module = attention(bias=bias)
    rows = torch.randn(shape)
    expected = module(rows)
    replace_linear_layers(module, Linear)
    assert [type(child) for child in module.children()] == [SharedProjection] * 3 + [Linear]
    assert not any(type(child) is nn.Linear for child in module.modules())
    torch.testing.assert_close(module(rows), expected, rtol=1e-5, atol=1e-5)


def test_projections_of_different_inputs_are_told_apart():
    module = attention()
    first, second = torch.randn(3, 24), torch.randn(3, 24)
    expected = (module.k_proj(second), module.q_proj(first), module.v_proj(first), module.v_proj(second))
    replace_linear_layers(module, Linear)
    module.q_proj(first)
    results = (module.k_proj(second), module.q_proj(first), module.v_proj(first), module.v_proj(second))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_threads_that_share_a_model_get_their_own_products():
    module = attention()
    inputs = [torch.randn(2, 24) for _ in range(4)]
    expected = [module(rows) for rows in inputs]
    replace_linear_layers(module, Linear)
    wrong: list[int] = []

    def work(index):
        for _ in range(200):
            if not torch.allclose(module(inputs[index]), expected[index], atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []


def test_inputs_and_plain_weights_are_let_go():
    module = attention()
    weights = [weakref.ref(child.weight) for child in module.children()]
    replace_linear_layers(module, Linear)
    rows = torch.randn(2, 24)
    module(rows)
    reference = weakref.ref(rows)
    del rows
    gc.collect()
    assert reference() is None
    assert [weight() for weight in weights] == [None] * 4


def test_at_most_one_layers_plain_weights_are_held_beside_the_new_ones():
    model = nn.Sequential(*(Attention(bias=True) for _ in range(5)))
    layers = [weakref.ref(layer) for layer in model.modules() if type(layer) is nn.Linear]
    num_alive = []

    def make_linear(weight, bias):
        num_alive.append(sum(layer() is not None for layer in layers))
        return Linear(weight, bias)

    replace_linear_layers(model, make_linear)
    assert num_alive == [20, 17, 16, 13, 12, 9, 8, 5, 4, 1]


def test_a_weight_tied_to_an_embedding_stays_there():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 8)
            self.lm_head = nn.Linear(8, 40, bias=False)
            self.lm_head.weight = self.embedding.weight

    module = Tied().requires_grad_(requires_grad=False)
    weight = module.embedding.weight.clone()
    replace_linear_layers(module, Linear)
    assert torch.equal(module.embedding.weight, weight)
    torch.testing.assert_close(module.lm_head(weight[3:4]), weight[3:4] @ weight.T)


class Norm(nn.Module):
    """A norm of a kind that models have. `replace_norms` must recognise the kind by what the norm computes."""

    rounds_once = True

    def __init__(self, weight, *, offset=0.0, subtracts_mean=False, epsilon=1e-6, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        self.eps, self.offset, self.subtracts_mean, self.epsilon = 1e-6, offset, subtracts_mean, epsilon

    def forward(self, rows):
        values = rows.float()
        values = values - self.subtracts_mean * values.mean(-1, keepdim=True)
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.epsilon)
        values = values if self.rounds_once else values.to(rows.dtype).float()
        return (values * (self.offset + self.weight.float())).to(rows.dtype)


class OurNorm(Norm):
    def __init__(self, weight, epsilon, rounds_once) -> None:
        super().__init__(weight, epsilon=epsilon)
        self.rounds_once = rounds_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [1.0, 150.0, 600.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_of_trained_weights_is_known_by_every_output(dtype, largest, offset):
    torch.manual_seed(0)
    weight = torch.randn(640).abs() * 8
    weight[:2] = torch.tensor([largest, -1.0])
    module = nn.Sequential(Norm(weight, offset=offset, dtype=dtype))
    rows = torch.randn(5, 640).to(dtype)
    expected = module(rows)
    replace_norms(module, OurNorm)
    assert type(module[0]) is OurNorm
    torch.testing.assert_close(module(rows), expected, rtol=2.0**-6 if dtype != torch.float32 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounds_once", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_rounds_as_often_as_the_one_that_it_replaces(dtype, rounds_once, offset):
    """Rounding twice has up to twice the error."""
    torch.manual_seed(0)
    module = nn.Sequential(Norm(torch.randn(640), offset=offset, dtype=dtype))
    module[0].rounds_once = rounds_once
    rows = torch.randn(5, 640).to(dtype)
    expected = module(rows)
    replace_norms(module, OurNorm)
    assert (module[0].rounds_once, torch.equal(module(rows), expected)) == (rounds_once, True)


@pytest.mark.parametrize("other", [{"subtracts_mean": True}, {"epsilon": 1e-4}, {"offset": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [3.0, 1e-3])
def test_another_function_is_no_rms_norm(other, dtype, weight):
    """This is noticed even with small weights, with which all outputs and their differences are small."""
    module = nn.Sequential(Norm(torch.full((8192,), weight), dtype=dtype, **other))
    replace_norms(module, OurNorm)
    assert type(module[0]) is Norm
