from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from outrider.engine.linear import PackedLinear, can_pack, pack_linear_layers

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="torch was built without oneDNN")


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 24, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)
        self.o_proj = nn.Linear(24, 24, bias=bias)

    def forward(self, rows):
        return self.o_proj(self.q_proj(rows) * torch.cat([self.k_proj(rows), self.v_proj(rows)] * 2, -1)[..., :24])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (1, 7, 24), (0, 24)])
def test_packed_layers_compute_the_same(bias, shape):
    torch.manual_seed(0)
    module = Attention(bias=bias).requires_grad_(requires_grad=False)
    rows = torch.randn(shape)
    expected = module(rows)
    assert pack_linear_layers(module) == 4
    assert not any(type(child) is nn.Linear for child in module.modules())
    torch.testing.assert_close(module(rows), expected, rtol=1e-5, atol=1e-5)


def test_a_packed_layer_still_tells_its_weight():
    layer = nn.Linear(30, 70)
    assert torch.equal(PackedLinear(layer.weight, layer.bias).weight, layer.weight)


def test_projections_of_different_inputs_are_told_apart():
    torch.manual_seed(0)
    module = Attention(bias=False).requires_grad_(requires_grad=False)
    first, second = torch.randn(3, 24), torch.randn(3, 24)
    expected = (module.k_proj(second), module.q_proj(first), module.v_proj(first), module.v_proj(second))
    pack_linear_layers(module)
    module.q_proj(first)
    results = (module.k_proj(second), module.q_proj(first), module.v_proj(first), module.v_proj(second))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_threads_that_share_a_model_get_their_own_products():
    torch.manual_seed(0)
    module = Attention(bias=False).requires_grad_(requires_grad=False)
    inputs = [torch.randn(2, 24) for _ in range(4)]
    expected = [module(rows) for rows in inputs]
    pack_linear_layers(module)
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
    module = Attention(bias=False).requires_grad_(requires_grad=False)
    weights = [weakref.ref(child.weight) for child in module.children()]
    pack_linear_layers(module)
    rows = torch.randn(2, 24)
    module(rows)
    reference = weakref.ref(rows)
    del rows
    gc.collect()
    assert reference() is None
    assert [weight() for weight in weights] == [None] * 4


def test_a_weight_tied_to_an_embedding_stays_there():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 8)
            self.lm_head = nn.Linear(8, 40, bias=False)
            self.lm_head.weight = self.embedding.weight

    module = Tied().requires_grad_(requires_grad=False)
    weight = module.embedding.weight.clone()
    pack_linear_layers(module)
    assert torch.equal(module.embedding.weight, weight)
    torch.testing.assert_close(module.lm_head(weight[3:4]), weight[3:4] @ weight.T)


def test_a_row_does_not_depend_on_the_rows_around_it():
    """What makes drafts free of consequences, as far as linear layers go; MKL's float32 product fails this."""
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(192, 576), None)
    rows = torch.randn(80, 576)
    alone = torch.cat([layer(rows[index : index + 1]) for index in range(80)])
    for num_rows in (2, 5, 16, 80):
        if not torch.equal(layer(rows[:num_rows]), alone[:num_rows]):
            pytest.skip("oneDNN's kernel for this processor is not invariant; nothing relies on it in float32")
