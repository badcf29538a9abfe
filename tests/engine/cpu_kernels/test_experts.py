"""Native experts against sums in float64, and their rows' bits in any company, on every instruction path."""

from __future__ import annotations

from ctypes import addressof
from dataclasses import astuple

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels import operators
from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.experts import Gate
from outrider.errors import InternalError
from tests.engine.cpu_kernels.operations import checked, differing_rows, guarded, guarded_copy, pack

NUM_EXPERTS, NUM_ROWS, NUM_SLOTS = 5, 23, 3
CLAMPED = Gate(2, alpha=1.7, limit=2.0, shift=1.0)
CASES = {
    "float32": (torch.float32, "", 64, 48, Gate()),
    "float32-odd": (torch.float32, "", 33, 17, Gate(1)),
    "bfloat16": (torch.bfloat16, "", 96, 64, Gate()),
    "bfloat16-odd": (torch.bfloat16, "", 35, 19, CLAMPED),
    "int8-bfloat16": (torch.bfloat16, "int8", 96, 72, CLAMPED),
    "int8-float32": (torch.float32, "int8", 130, 33, Gate()),
    "int4-bfloat16": (torch.bfloat16, "int4", 128, 64, Gate()),
}
"""Dtype of rows, `quantise`, hidden and intermediate size, and gate."""


class Layer:
    """Experts with random weights and biases, and random rows."""

    def __init__(self, name):
        self.dtype, self.quantise, self.hidden, self.intermediate, self.gate = CASES[name]
        generator = torch.Generator().manual_seed(1)

        def random(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=generator)).to(self.dtype)

        half = NUM_EXPERTS, self.intermediate
        self.up = [random(*half, self.hidden, scale=self.hidden**-0.5) for _ in range(2)]
        self.up_biases = [random(*half) for _ in range(2)]
        self.down = random(NUM_EXPERTS, self.hidden, self.intermediate, scale=self.intermediate**-0.5)
        self.down_bias = random(NUM_EXPERTS, self.hidden)
        self.rows = random(NUM_ROWS, self.hidden)
        self.expert_ids = torch.stack(
            [torch.randperm(NUM_EXPERTS - 1, generator=generator)[:NUM_SLOTS] for _ in range(NUM_ROWS)]
        )  # fmt: skip (no row has the last expert)
        self.weights = torch.rand((NUM_ROWS, NUM_SLOTS), generator=generator)

    def packed(self, kernels):
        options = {"quantise": self.quantise}
        gate_up = [
            pack(
                kernels, [each[i] for each in self.up], [each[i] for each in self.up_biases], interleave=True, **options
            )
            for i in range(NUM_EXPERTS)
        ]
        down = [pack(kernels, [self.down[i]], [self.down_bias[i]], **options) for i in range(NUM_EXPERTS)]
        return gate_up, down

    def compute(self, kernels, of_rows=slice(None), *, packed=None, workspace=None):
        """Returns the layer's output for some rows."""
        matrices = packed or self.packed(kernels)
        arrays = [(structures.OutriderMatrix * NUM_EXPERTS)(*[each.struct for each in group]) for group in matrices]
        struct = structures.OutriderExperts(
            NUM_EXPERTS, self.hidden, self.intermediate, *map(addressof, arrays), *astuple(self.gate)
        )  # fmt: skip
        x = guarded_copy(self.rows[of_rows])
        y = guarded(x.shape, x.dtype)
        chosen = self.expert_ids[of_rows].contiguous(), self.weights[of_rows].contiguous()
        operators.experts(kernels, workspace or Workspace(kernels.library), struct, x, *chosen, y)
        return checked(y)

    def expected(self, kernels):
        """Returns the same in float64, with the weights as they are packed."""

        def weight(matrix):
            return torch.from_numpy(np.stack([matrix.row(row) for row in range(matrix.out_features)])).double()

        gate_up, down = ([weight(each) for each in matrices] for matrices in self.packed(kernels))
        order = np.arange(len(gate_up[0])).reshape(-1, 2, 16).swapaxes(0, 1).reshape(2, -1)[:, : self.intermediate]
        y = torch.zeros((NUM_ROWS, self.hidden), dtype=torch.float64)
        for row in range(NUM_ROWS):
            for expert, factor in zip(self.expert_ids[row].tolist(), self.weights[row].double(), strict=True):
                gate, up = (
                    gate_up[expert][order[part]] @ self.rows[row].double() + self.up_biases[part][expert].double()
                    for part in range(2)
                )
                y[row] += factor * (down[expert] @ self.gate(gate, up) + self.down_bias[expert].double())
        return y


@pytest.mark.parametrize("name", CASES)
def test_experts_compute_the_weighted_sum_of_each_rows_slots(name, library, teams):
    layer, kernels = Layer(name), teams(library, 2)
    found, expected = layer.compute(kernels).double(), layer.expected(kernels)
    allowed = 0.03 if layer.quantise else {torch.float32: 1e-5, torch.bfloat16: 0.02}[layer.dtype]
    assert float((found - expected).abs().max()) <= allowed * float(expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone_in_company_and_with_more_threads(name, library, teams):
    layer, kernels = Layer(name), teams(library, 1)
    packed, workspace = layer.packed(kernels), Workspace(library)
    whole = layer.compute(kernels, packed=packed, workspace=workspace)
    alone = [layer.compute(kernels, slice(row, row + 1), packed=packed, workspace=workspace) for row in range(NUM_ROWS)]
    assert differing_rows(torch.cat(alone), whole) == []
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(5))
    assert differing_rows(layer.compute(teams(library, 2), order, packed=packed), whole[order]) == []
    assert differing_rows(layer.compute(teams(library, 3), slice(4, 11), packed=packed), whole[4:11]) == []


def test_kernels_that_break_the_rule_are_noticed(rule_breaking_library, teams):
    layer, kernels = Layer("float32"), teams(rule_breaking_library, 1)
    alone = [layer.compute(kernels, slice(row, row + 1)) for row in range(NUM_ROWS)]
    assert differing_rows(torch.cat(alone), layer.compute(kernels)) != []


def test_slots_are_added_in_their_order(kernels):
    """The order within a row is the router's: another order rounds some values in another way."""
    layer = Layer("float32")
    first = layer.compute(kernels)
    layer.expert_ids, layer.weights = layer.expert_ids.flip(1), layer.weights.flip(1)
    second = layer.compute(kernels)
    assert differing_rows(first, second) != []
    torch.testing.assert_close(first, second)


def test_slots_without_an_expert_add_nothing(kernels):
    layer = Layer("bfloat16")
    kept = layer.compute(kernels)
    layer.expert_ids = torch.cat((layer.expert_ids, torch.tensor([[NUM_EXPERTS], [-1]] * NUM_ROWS)[:NUM_ROWS]), dim=1)
    layer.weights = torch.cat((layer.weights, torch.full((NUM_ROWS, 1), torch.nan)), dim=1)
    assert differing_rows(layer.compute(kernels), kept) == []
    layer.expert_ids = torch.full_like(layer.expert_ids, NUM_EXPERTS)
    assert not layer.compute(kernels).any()
    assert layer.compute(kernels, slice(0, 0)).shape == (0, layer.hidden)


def test_rows_of_another_type_than_plain_weights_are_refused(kernels):
    layer = Layer("bfloat16")
    packed = layer.packed(kernels)
    layer.rows = layer.rows.float()
    with pytest.raises(InternalError, match="weights of another type"):
        layer.compute(kernels, packed=packed)


def test_values_that_are_not_finite_stay_in_their_row(kernels):
    layer = Layer("bfloat16")
    clean = layer.compute(kernels)
    layer.rows[3, 7] = torch.inf
    layer.rows[9] = torch.nan
    found = layer.compute(kernels)
    assert differing_rows(found, clean) == [3, 9]
    assert found[9].isnan().all()
