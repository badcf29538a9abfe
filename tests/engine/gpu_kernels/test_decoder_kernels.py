"""A decoder layer's operations between its matrix products give transformers' results, in any batch."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

kernels = pytest.importorskip("triton") and pytest.importorskip("outrider.engine.gpu_kernels.decoder")

HAS_CUDA = torch.cuda.is_available()
NO_GPU = pytest.mark.skipif(HAS_CUDA, reason="runs on the GPU")
KINDS = [  # triton's interpreter does not round to bfloat16 as a GPU does
    *(pytest.param(("cpu", dtype), marks=NO_GPU) for dtype in (torch.float32, torch.float16)),
    *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16)),
]
ROUNDINGS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Maximum relative difference of two results. In float32, it exceeds one rounding, since sums have another order."""
NUM_ROWS, NUM_HEADS, NUM_KV_HEADS = 9, 5, 2
PARTS = [slice(0, 1), slice(3, 5), slice(4, 9)]


@pytest.fixture
def _interpreted():
    """Replaces the fixture that skips tests on a GPU: these run on a GPU if there is one."""


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{str(kind[1]).removeprefix('torch.')}")
def numbers(request):
    """numbers(*shape) returns random numbers."""
    device, dtype = request.param
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def close(found, expected):
    """Checks that two results differ by no more than ROUNDINGS allows, since sums have another order."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=ROUNDINGS[found.dtype], atol=1e-6)


def norm_of(kind, weight):
    module = kind(len(weight), eps=1e-3).to(weight.device)
    module.weight.data = weight
    if kind is LlamaRMSNorm:
        return kernels.Norm(weight, 1e-3), module
    return kernels.Norm(1.0 + weight.float(), 1e-3, rounds_first=False), module


@torch.inference_mode()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("width", [96, 128])
def test_sums_and_their_norms(numbers, kind, width):
    residual, added = numbers(NUM_ROWS, width), numbers(NUM_ROWS, width)
    norm, module = norm_of(kind, numbers(width))
    first_norm, first_module = norm_of(kind, numbers(width))
    close(kernels.rms_norm(residual, norm), module(residual))
    total, output = kernels.add_rms_norm(residual, added, norm)
    assert torch.equal(total, residual + added)
    close(output, module(total))
    both = kernels.add_rms_norm(residual, added, norm, first_norm)
    close(both[0], residual + first_module(added))
    close(both[1], module(both[0]))
    for part in PARTS:
        found = kernels.add_rms_norm(residual[part], added[part], norm, first_norm)
        assert all(torch.equal(each, whole[part]) for each, whole in zip(found, both, strict=True))
    assert kernels.rms_norm(residual[:0], norm).shape == (0, width)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [None, LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotations_and_what_is_stored(numbers, kind, head_dim):
    num_all = NUM_HEADS + 2 * NUM_KV_HEADS
    projected = numbers(NUM_ROWS, num_all * head_dim)
    angles = numbers(40, head_dim // 2)
    device = projected.device
    cosines, sines = angles.cos(), angles.sin()
    positions = torch.tensor([3, 4, 5, 39, 0, 17, 18, 3, 9], device=device)
    slots = torch.tensor([1, 2, 11, 5, 0, 9, 8, 7, 3], device=device)
    norms, modules = None, [torch.nn.Identity(), torch.nn.Identity()]
    if kind is not None:
        norms, modules = zip(*(norm_of(kind, numbers(head_dim)) for _ in range(2)), strict=True)

    def run(part):
        caches = [torch.full((3, 4, NUM_KV_HEADS, head_dim), 7.0, device=device, dtype=projected.dtype) for _ in "kv"]
        query = kernels.rotate_and_store(
            projected[part], *caches, cosines=cosines, sines=sines, positions=positions[part], slots=slots[part],
            norms=norms,
        )  # fmt: skip
        return query, *(each.flatten(0, 1) for each in caches)

    query, keys, values = run(slice(0, NUM_ROWS))
    parts = projected.view(NUM_ROWS, num_all, head_dim).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
    both_halves = [torch.cat([each[positions]] * 2, -1) for each in (cosines, sines)]
    expected = apply_rotary_pos_emb(modules[0](parts[0]), modules[1](parts[1]), *both_halves)
    assert torch.equal(values[slots], parts[2])
    for found, own in zip((query, keys[slots]), expected, strict=True):
        if kind is None and found.dtype is not torch.float32:
            assert torch.equal(found, own)  # both are rounded in the same places
        else:
            torch.testing.assert_close(found, own, rtol=0.0, atol=ROUNDINGS[found.dtype] * float(own.abs().max()))
    assert bool((keys[[4, 6, 10]] == 7.0).all())  # slots of others
    for part in PARTS:
        few = run(part)
        assert torch.equal(few[0], query[part])
        assert torch.equal(few[1][slots[part]], keys[slots[part]])


@torch.inference_mode()
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activated_gates(numbers, activation):
    gate_up = numbers(NUM_ROWS, 2 * 1200) * 3.0  # two programs for each row, the second of which is partly empty
    gate, up = gate_up.chunk(2, -1)
    own = torch.nn.functional.silu(gate)
    if activation != "silu":
        own = torch.nn.functional.gelu(gate, approximate="tanh")
    found = kernels.activate(gate_up, activation)
    torch.testing.assert_close(found, own * up, rtol=2.0 * ROUNDINGS[found.dtype], atol=1e-5)
    for part in PARTS:
        assert torch.equal(kernels.activate(gate_up[part], activation), found[part])
