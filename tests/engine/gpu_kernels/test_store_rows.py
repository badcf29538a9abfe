"""Keys and values written to their slots by our Triton kernel, in the interpreter, and by torch."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.module_steps import store_in_torch

kernels = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.gpu_kernels.cache")


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 16), (3, 24), (8, 128)])
@pytest.mark.parametrize("layout", ["side by side", "heads first", "apart"])
def test_slots_have_what_torch_writes_and_others_what_they_had(num_heads, head_dim, layout):
    generator = torch.Generator().manual_seed(1)
    shape = {"side by side": (5, num_heads, head_dim), "heads first": (num_heads, 5, head_dim)}.get(
        layout, (5, num_heads, 2 * head_dim)
    )
    rows = [torch.randn(shape, generator=generator) for _ in range(2)]
    if layout == "heads first":  # as transformers gives them
        rows = [each.transpose(0, 1) for each in rows]
    elif layout == "apart":
        rows = [each[..., ::2] for each in rows]
    before = [torch.randn((4, 16, num_heads, head_dim), generator=generator) for _ in range(2)]
    found, expected = ([each.clone() for each in before] for _ in range(2))
    slots = torch.tensor([3, 63, 17, 0, 40])
    kernels.store(*rows, *found, slots)
    store_in_torch(*rows, *expected, slots)
    assert all(map(torch.equal, found, expected))
    assert not any(map(torch.equal, found, before))
